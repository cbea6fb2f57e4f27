"""Sections of the settings; `schema.py` combines them into pipelines."""
