"""Size of the package as ratchets: a limit for each figure, and the feature that raised it last."""

import pytest

from spmd_rl.config.keys import leaves
from spmd_rl.config.pipelines import PIPELINES
from tests.house.sources import ROOT, rooms_imported_by

LIMITS = {
    # A feature raises a limit by what it needs, in this line, and names itself there.
    "lines": (
        53_979,
        "plans of DeepSpeed and Megatron, decode steps as CUDA graphs, hybrids with tp, short plans of pictures",
    ),
    "files": (437, "host groups of several nodes, decode steps as CUDA graphs"),
    "rooms": (29, "rewards for diffusion models"),
    "arrows": (156, "rewards for diffusion models"),
    "settings": (342, "frozen vision towers, hashes in the journal, trackio, steps until, decoded frames"),
    "page": (1_096, "pictures, and a run that goes on"),
}
"""Figures of `spmd_rl` with their limits. Lines are those of code, docstrings and blanks, without comments; a room is a
folder or file at its top; an arrow is a room that imports another one; a setting is a key of any pipeline; the
page has lines of script, style and HTML."""

FILES = sorted((ROOT / "spmd_rl").rglob("*.py"))


def num_lines() -> int:
    """Lines without those that hold a comment alone: a reason costs nothing."""
    return sum(not line.lstrip().startswith("#") for path in FILES for line in path.read_text().splitlines())


FIGURES = {
    "lines": num_lines,
    "files": lambda: len(FILES),
    "rooms": lambda: len(rooms_imported_by()),
    "arrows": lambda: sum(map(len, rooms_imported_by().values())),
    "page": lambda: sum(len(p.read_text().splitlines()) for p in (ROOT / "spmd_rl/track/page").iterdir()),
    "settings": lambda: len({leaf.key for schema in PIPELINES.values() for leaf in leaves(schema)}),
}


@pytest.mark.parametrize("figure", LIMITS)
def test_a_figure_is_within_its_limit(figure: str) -> None:
    found, (limit, feature) = FIGURES[figure](), LIMITS[figure]
    assert found <= limit, (
        f"{found} {figure}, of at most {limit} ({feature}); a feature that needs more raises the limit"
    )
