"""Instructions that a program can check in an answer, for `rewards.ifeval`."""
