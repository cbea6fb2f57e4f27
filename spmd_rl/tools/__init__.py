"""Programs for people: `python -m spmd_rl` lists them. Nothing imports them."""
