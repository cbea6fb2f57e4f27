"""A version that a generating rank holds stays until it has been fetched; one that is gone is not held, and said so."""

import threading
from contextlib import nullcontext

import pytest
import torch

from spmd_rl.weights.messages import digest
from spmd_rl.weights.staged import Staged
from tests.servers import connect, serve


def pieces(version: int) -> dict[int, Staged]:
    payload = bytes([version]) * 4
    return {0: Staged("weight", "uint8", [4], memoryview(payload), digest(payload))}


@pytest.fixture
def ends(tmp_path):
    """Two training ranks' servers, and a generating rank's client."""
    servers = serve(tmp_path, 2)
    client = connect([server.address for server in servers])
    yield servers, client
    client.close()
    for server in servers:
        server.close()


def test_a_held_version_outlives_those_that_follow(ends) -> None:
    servers, client = ends
    for version in (1, 2):
        for server in servers:
            server.weights.stage(version, pieces(version), None, nullcontext())
    assert client.hold(1)
    later = threading.Thread(target=servers[0].weights.stage, args=(3, pieces(3), None, nullcontext()), daemon=True)
    later.start()
    ((name, tensor, _),) = client.fetch(1, 1, None)
    assert name == "weight" and torch.equal(tensor, torch.ones(4, dtype=torch.uint8))
    later.join(30)
    assert servers[0].weights.newest == 3 and not client.hold(1), "nobody holds it any more"


def test_what_one_of_them_has_let_go_of_is_not_held_by_the_others(ends) -> None:
    (first, second), client = ends
    for version in (1, 2, 3):
        first.weights.stage(version, pieces(version), None, nullcontext())
    for version in (1, 2):
        second.weights.stage(version, pieces(version), None, nullcontext())
    assert not client.hold(1)
    second.weights.stage(3, pieces(3), None, nullcontext())  # does not wait
    assert client.hold(3)
