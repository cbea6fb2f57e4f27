"""Tests; none of them asks the Hugging Face hub."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
