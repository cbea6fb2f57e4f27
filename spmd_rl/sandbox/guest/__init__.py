"""The code of confined processes. Standard library only, and Python 3.8 or later (the system's).

`main` reads the job. A check has two processes, and a `link` between them that carries plain `values`: `testing` runs
the tests, which see a `remote` for each object of the program, and `serve` runs the program. `survey` decides from the
text of tests if that is enough.
"""
