"""What runs in a confined process beside untrusted code. Standard library only, and Python 3.8 or later (the system's).

`main` reads the job, `testing` runs tests, `rpc` lets the tests call the code that they test.
"""
