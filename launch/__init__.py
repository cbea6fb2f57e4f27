"""Pinned environments and cluster templates. Torch-free."""
