"""The YAML files of the settings, as data of a package; see `spmd_rl/config/load.py`."""
