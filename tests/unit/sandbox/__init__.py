"""The sandbox, under attack."""
