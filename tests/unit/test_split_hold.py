"""A version that a generating rank holds stays until it has been fetched; one that is gone is not held, and said so."""

import threading
from contextlib import nullcontext

import pytest
import torch

from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange
from spmd_rl.weights.messages import digest
from spmd_rl.weights.staged import Staged


def pieces(version: int) -> dict[int, Staged]:
    payload = bytes([version]) * 4
    return {0: Staged("weight", "uint8", [4], memoryview(payload), digest(payload))}


@pytest.fixture
def ends(tmp_path):
    """Two training ranks' exchanges, and a generating rank's courier."""
    exchanges = [Exchange(f"ipc://{tmp_path}/x{rank}/s") for rank in range(2)]
    courier = Courier([exchange.address for exchange in exchanges], 0, lambda: None)
    yield exchanges, courier
    courier.close()
    for exchange in exchanges:
        exchange.close()


def test_a_held_version_outlives_those_that_follow(ends) -> None:
    exchanges, courier = ends
    for version in (1, 2):
        for exchange in exchanges:
            exchange.weights.stage(version, pieces(version), None, nullcontext())
    assert courier.hold(1)
    later = threading.Thread(target=exchanges[0].weights.stage, args=(3, pieces(3), None, nullcontext()), daemon=True)
    later.start()
    ((name, tensor, _),) = courier.fetch(1, 1, None)
    assert name == "weight" and torch.equal(tensor, torch.ones(4, dtype=torch.uint8))
    later.join(30)
    assert exchanges[0].weights.newest == 3 and not courier.hold(1), "nobody holds it any more"


def test_what_one_of_them_has_let_go_of_is_not_held_by_the_others(ends) -> None:
    (first, second), courier = ends
    for version in (1, 2, 3):
        first.weights.stage(version, pieces(version), None, nullcontext())
    for version in (1, 2):
        second.weights.stage(version, pieces(version), None, nullcontext())
    assert not courier.hold(1)
    second.weights.stage(3, pieces(3), None, nullcontext())  # does not wait
    assert courier.hold(3)
