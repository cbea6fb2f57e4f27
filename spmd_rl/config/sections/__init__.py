"""The sections of the settings, a file for those that belong together; `schema.py` puts them into pipelines."""
