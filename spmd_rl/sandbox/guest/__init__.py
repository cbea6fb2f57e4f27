"""What runs inside a sandbox beside untrusted code. Standard library only, and Python 3.8 up: it may be the system's.

`main` is the first line in the box, `link` how the tests reach the code that they test, `probe` how they are run.
"""
