"""Time zones for programs that can open no file: `zoneinfo` gets their data from memory."""

import io
import os
import zoneinfo
from pathlib import Path

SKIPPED = {"posix", "right"}  # copies of all zones, and the zones with leap seconds


def keep_zones() -> None:
    """Read all zones below the first folder there is, and have `zoneinfo` look for them here alone."""
    root = next((folder for folder in zoneinfo.TZPATH if os.path.isdir(folder)), "")
    zones = {}
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        for path in (Path(folder, file) for file in files):
            if path.is_file() and (data := path.read_bytes()).startswith(b"TZif"):  # no link to nowhere
                zones[path.relative_to(root).as_posix()] = data

    def load(key: str) -> io.BytesIO:
        if key not in zones:
            raise zoneinfo.ZoneInfoNotFoundError(f"No time zone found with key {key}")
        return io.BytesIO(zones[key])

    zoneinfo._common.load_tzdata, zoneinfo.available_timezones = load, lambda: set(zones)
