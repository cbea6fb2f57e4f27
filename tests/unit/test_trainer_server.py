"""What training ranks keep for generating ones, and what of it they get: whole, in time, and only whom they know."""

import threading
import time
from array import array
from concurrent.futures import wait
from contextlib import closing, nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from launch import sidecar_keys
from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.errors import RunFailed
from spmd_rl.process import in_background
from spmd_rl.sidecar.sockets import send
from spmd_rl.split import messages as split_messages
from spmd_rl.split.server import TrainerServer
from spmd_rl.types import AgentStep, CandidateIds, Sample, Turn, Verdict
from spmd_rl.types.encoded import pack, unpack
from spmd_rl.weights import messages
from spmd_rl.weights.staged import Staged
from tests import sockets
from tests.patience import patient
from tests.servers import SEAL, connect, serve

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "c": torch.tensor([True, False]),
}


def staged(tensors: dict[str, torch.Tensor]) -> dict[int, Staged]:
    found = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        payload = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[index] = Staged(name, dtype, list(tensor.shape), payload, messages.digest(payload))
    return found


@pytest.fixture
def servers(tmp_path: Path):
    made = serve(tmp_path, 2)
    yield made
    for server in made:
        server.close()


@pytest.fixture
def client(servers):
    made = connect([server.address for server in servers], 5)
    yield made
    made.close()


def stage(servers: list[TrainerServer], version: int, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    for rank, server in enumerate(servers):
        mine = {index: piece for index, piece in staged(tensors).items() if index % len(servers) == rank}
        server.weights.stage(version, mine, None, nullcontext())


def test_every_tensor_arrives_in_order_and_to_the_bit(servers, client) -> None:
    stage(servers, 3)
    found = list(client.fetch(3, len(TENSORS), None))
    assert [name for name, _, _ in found] == list(TENSORS)
    for name, tensor, digest in found:
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
        assert digest == next(piece.digest for piece in staged(TENSORS).values() if piece.name == name)


def test_the_last_two_versions_are_kept(servers, client) -> None:
    for version in range(3):
        stage(servers, version)
    assert len(list(client.fetch(1, len(TENSORS), None))) == len(TENSORS)
    for version in (0, 3):
        with pytest.raises(RunFailed, match=f"training rank 0 does not keep version {version} of the weights"):
            next(client.fetch(version, len(TENSORS), None))


def test_a_version_stays_until_whoever_fetches_it_has_it(servers, client) -> None:
    stage(servers, 0)
    pieces = client.fetch(0, len(TENSORS), None)
    next(pieces)
    stage(servers, 1)
    late = threading.Thread(target=stage, args=(servers, 2), daemon=True)
    late.start()
    late.join(0.3)
    assert late.is_alive()
    assert len(list(pieces)) == len(TENSORS) - 1
    late.join(10)
    assert not late.is_alive()


def test_damage_on_the_way_is_found(servers, client) -> None:
    pieces = staged(TENSORS)
    pieces[2] = pieces[2]._replace(payload=memoryview(bytes([6, *pieces[2].payload[1:]])))
    for rank, server in enumerate(servers):
        server.weights.stage(0, {i: piece for i, piece in pieces.items() if i % 2 == rank}, None, nullcontext())
    with pytest.raises(RunFailed, match="version 0 of scalar arrived damaged"):
        list(client.fetch(0, len(TENSORS), None))


def test_a_fetch_that_is_never_ended_holds_up_nobody_for_ever(tmp_path: Path) -> None:
    """And nobody a second time; who does not beat holds nothing."""
    (server,) = serve(tmp_path, lease_seconds=0.1)  # ten of these
    over = threading.Event()

    def beat(dealer: zmq.Socket) -> None:
        while not over.wait(0.02):
            send(dealer, split_messages.Beat(*SEAL.membership(0), 0, True))

    with closing(server), closing(connect([server.address])) as client, sockets.context() as context:
        stage([server], 0)
        assert not client.hold(0)
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(server.address)
            beating = threading.Thread(target=beat, args=(dealer,), daemon=True)
            beating.start()
            while not client.hold(0):
                time.sleep(0.01)
            pieces = client.fetch(0, len(TENSORS), None)
            next(pieces)
            stage([server], 1)
            began = time.monotonic()
            stage([server], 2)
            assert 0.8 < time.monotonic() - began < patient(10)
            with pytest.raises(RunFailed, match="training rank 0 does not keep version 0 of the weights for this rank"):
                list(client.fetch(0, len(TENSORS), None)) if not list(pieces) else None
            assert client.hold(1)
            began = time.monotonic()
            stage([server], 3)
            assert time.monotonic() - began < 0.5
            over.set()
            beating.join()


def test_only_listed_keys_are_served(tmp_path: Path) -> None:
    ours, foreign = (sidecar_keys.make(tmp_path / name) for name in ("ours", "foreign"))
    with closing(serve("tcp://127.0.0.1", keys=HostKeys.load(ours))[0]) as server:
        stage([server], 0)
        with closing(connect([server.address], 0, ClientKeys.load(ours))) as known:
            assert len(list(known.fetch(0, len(TENSORS), None))) == len(TENSORS)
        for keys in (None, ClientKeys(ClientKeys.load(ours).server, ClientKeys.load(foreign).secret)):
            with sockets.context() as context, context.socket(zmq.DEALER) as stranger:
                if keys is not None:
                    keys.secure(stranger)
                stranger.connect(server.address)
                for _ in range(3):  # from the moment in which it is refused nothing more is taken from it
                    send(stranger, messages.Hold(*SEAL.membership(0), 0, None))
                    assert not stranger.poll(300)


def test_a_client_that_is_refused_can_be_given_up(tmp_path: Path) -> None:
    ours, foreign = (sidecar_keys.make(tmp_path / name) for name in ("ours", "foreign"))
    keys = ClientKeys(ClientKeys.load(ours).server, ClientKeys.load(foreign).secret)
    with (
        closing(serve("tcp://127.0.0.1", keys=HostKeys.load(ours))[0]) as server,
        closing(connect([server.address], 0, keys)) as client,
    ):
        time.sleep(0.5)  # by now it is refused
        fetching = in_background("fetch", lambda: list(client.fetch(0, 1, None)))
        assert not wait([fetching], 0.5).done
        client.give_up()
        with pytest.raises(RunFailed, match="nobody waits any longer"):
            fetching.result(patient(5))


def test_samples_travel_whole() -> None:
    step = AgentStep("you moved", -0.1, 2**64 - 1, "left", {"valid": 1.0}, "board")
    turns = (
        Turn(array("i", [1, 2]), array("i", [3]), array("f", [-0.5]), array("i", [7]), "stop", "text", None, step),
        Turn(array("i"), array("i", [4]), array("f", [-1.5]), array("i", [8]), "length", "", CandidateIds(
            array("i", [2]), array("i", [4, 9])
        )),
    )  # fmt: skip
    verdict = Verdict("ok", 0.5, {"right": 1.0}, "why", "")
    samples = (Sample(11, 0, turns, verdict, False, 3, False), Sample(11, 1, turns, verdict))
    assert unpack(pack(samples), tuple[Sample, ...]) == samples
    with pytest.raises(msgspec.MsgspecError):
        unpack(pack(samples)[:-1], tuple[Sample, ...])
