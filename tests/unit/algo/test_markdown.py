"""docs/ALGORITHMS.md and the docstrings it is made of."""

import inspect
from pathlib import Path

import pytest

from spmd_rl.algo.markdown import SECTIONS, fields, markdown

ROOT = Path(__file__).resolve().parents[3]
ENTRIES = [(f"{section.title}: {name}", function) for section in SECTIONS for name, function in section.members.items()]


def test_algorithms_md_is_current() -> None:
    """Mend with: python -m spmd_rl.algo.markdown > docs/ALGORITHMS.md"""
    assert (ROOT / "docs" / "ALGORITHMS.md").read_text() == markdown()


@pytest.mark.parametrize(("name", "function"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_each_says_its_source_its_use_and_its_keys(name: str, function) -> None:
    said = fields(function)
    assert said["Source"] and said["Use"]
    parameters = inspect.signature(function).parameters.values()
    keys = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {key for key in keys if f"`{key}`" not in said.get("Keys", "")} == set()
