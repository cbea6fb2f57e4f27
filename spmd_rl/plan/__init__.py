"""A plan that fits before it runs: what a rank of a run would hold and send, without the ranks, weights or devices."""
