"""What every named loss, term and aggregation keeps to, beside the fields that `test_markdown.py` asks for."""

import inspect
import re
from collections.abc import Callable

import pytest

from spmd_rl.algo import AGGREGATIONS, POLICY_LOSSES, POLICY_TERMS
from spmd_rl.algo.correction import correction
from spmd_rl.algo.markdown import SECTIONS, fields

OURS: dict[str, Callable] = {**POLICY_LOSSES, **POLICY_TERMS, **AGGREGATIONS, "correction": correction}


@pytest.mark.parametrize("name", list(OURS))
def test_a_formula_and_a_source_that_can_be_found(name: str) -> None:
    assert re.search(r"\n\n    \S.* = .*\n", inspect.getdoc(OURS[name]) or ""), "no formula, indented by four"
    assert re.search(r"arXiv \d{4}\.\d{5}|\b(19|20)\d\d\b", fields(OURS[name])["Source"]), "no number or year"


@pytest.mark.parametrize("name", list(OURS))
def test_keys_are_keyword_only(name: str) -> None:
    """`learn` binds them by name, and defaults stand in the settings alone."""
    parameters = list(inspect.signature(OURS[name]).parameters.values())
    assert parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD
    assert all(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters[1:])


def test_all_stand_in_the_reference() -> None:
    listed = {function for section in SECTIONS for function in section.members.values()}
    assert set(OURS.values()) <= listed
