"""Programs for people, above everything else: `python -m spmd_rl` lists them. Nothing imports them."""
