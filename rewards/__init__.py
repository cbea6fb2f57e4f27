"""Rewarders, one a file; of ours they import `spmd_rl.types` alone."""
