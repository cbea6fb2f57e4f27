"""Rewarders, one a file; of this package they import `spmd_rl.types` alone."""
