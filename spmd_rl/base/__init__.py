"""Foundations of every room: errors, processes, the hub, devices, keys, command lines, classes named by settings."""
