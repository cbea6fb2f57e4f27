"""The code of confined processes, beside untrusted code. Standard library only, and Python 3.8 or later (the system's).

`main` reads the job. A check has two processes with a `link` between that carries plain `values`: in `testing` tests
run, for which a `remote` stands for each thing of the program, which `serve` executes. `survey` decides from
the text of tests whether that suffices.
"""
