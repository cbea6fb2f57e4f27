"""Foundations of every room: errors, processes, the hub, devices, keys, command lines, plug-ins named by settings."""
