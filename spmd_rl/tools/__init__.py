"""Programs for people, on the top floor: `python -m spmd_rl` lists them. Nothing imports them."""
