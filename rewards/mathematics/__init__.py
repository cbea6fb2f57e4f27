"""Reading of mathematical text, for the rewarders."""
