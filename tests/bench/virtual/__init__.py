"""Studies on the virtual clocks of `spmd_rl.tools.simulate`: what policies of the scheduler and placements bring."""
