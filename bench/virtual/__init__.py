"""Studies on the virtual clocks of `bench.virtual.simulate`: what policies of the scheduler and placements bring."""
