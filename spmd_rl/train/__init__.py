"""The training wing: roles behind the Protocols of `base`, each backend in the folder of its name.

Torch-free up to here: what a backend refuses (`config/backends.py`) is asked before torch is imported.
"""
