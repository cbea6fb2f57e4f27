"""The scheduler on virtual clocks: rounds, coordinators and claims are the real ones, engines and the store are models.

`lengths` says how long answers get, `engine` how long they take, `store` counts what it is asked, `replica` and
`cluster` play the steps of a `scene`, `policies` compares. `python -m bench.virtual.simulate` is the front.
"""
