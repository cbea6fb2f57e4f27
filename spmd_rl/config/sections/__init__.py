"""Sections of the settings, related ones in one file; `schema.py` combines them into pipelines."""
