"""Adapters: environments of other libraries and servers, one a file. A package is imported when one is built."""
