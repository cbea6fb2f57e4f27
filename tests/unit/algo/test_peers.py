"""Ours against what verl, TRL and NeMo-RL make of the same inputs, frozen by `freeze_peers.py`."""

import json
from pathlib import Path

import pytest

from tests.unit.algo.peers import NUM_INPUTS, OURS, digest, made

FROZEN = json.loads((Path(__file__).parent / "peers.json").read_text())
TOLERANCE = 1e-6
WIDER = {"verl reinforce_pp_baseline": 1e-5}
"""Where docs/ALGORITHMS.md says why the peer's values are others."""


def test_every_peer_is_named_with_its_revision_and_function() -> None:
    assert FROZEN.keys() == OURS.keys()
    assert all(len(column["values"]) == NUM_INPUTS and len(column["source"].split()) >= 3 for column in FROZEN.values())


@pytest.mark.parametrize("name", list(OURS))
def test_ours_are_the_values_and_gradients_of_the_peer(name: str) -> None:
    for number, theirs in enumerate(FROZEN[name]["values"]):
        ours = digest(*OURS[name](made(number)))
        assert ours == pytest.approx(theirs, rel=WIDER.get(name, TOLERANCE), abs=WIDER.get(name, TOLERANCE)), number
