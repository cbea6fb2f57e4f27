"""What training ranks keep for generating ones, and what these deliver: whole, once, and only to whom they know."""

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
from spmd_rl.split.courier import Courier
from spmd_rl.split.exchange import Exchange
from spmd_rl.split.groups import pack, unpack_groups
from spmd_rl.types import AgentStep, CandidateIds, Group, Message, Prompt, Sample, Turn, Verdict
from spmd_rl.weights import messages
from spmd_rl.weights.staged import Staged
from tests import sockets
from tests.patience import patient

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
def exchanges(tmp_path: Path):
    made = [Exchange(f"ipc://{tmp_path}/x/{rank}") for rank in range(2)]
    yield made
    for exchange in made:
        exchange.close()


@pytest.fixture
def courier(exchanges):
    made = Courier([exchange.address for exchange in exchanges], 5, lambda: None)
    yield made
    made.close()


def stage(exchanges: list[Exchange], version: int, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    for rank, exchange in enumerate(exchanges):
        mine = {index: piece for index, piece in staged(tensors).items() if index % len(exchanges) == rank}
        exchange.weights.stage(version, mine, None, nullcontext())


def test_every_tensor_arrives_in_order_and_to_the_bit(exchanges, courier) -> None:
    stage(exchanges, 3)
    found = list(courier.fetch(3, len(TENSORS), None))
    assert [name for name, _, _ in found] == list(TENSORS)
    for name, tensor, digest in found:
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
        assert digest == next(piece.digest for piece in staged(TENSORS).values() if piece.name == name)


def test_the_last_two_versions_are_kept(exchanges, courier) -> None:
    for version in range(3):
        stage(exchanges, version)
    assert len(list(courier.fetch(1, len(TENSORS), None))) == len(TENSORS)
    for version in (0, 3):
        with pytest.raises(RunFailed, match=f"training rank 0 does not keep version {version} of the weights"):
            next(courier.fetch(version, len(TENSORS), None))


def test_a_version_stays_until_whoever_fetches_it_has_it(exchanges, courier) -> None:
    stage(exchanges, 0)
    pieces = courier.fetch(0, len(TENSORS), None)
    next(pieces)
    stage(exchanges, 1)
    late = threading.Thread(target=stage, args=(exchanges, 2), daemon=True)
    late.start()
    late.join(0.3)
    assert late.is_alive()
    assert len(list(pieces)) == len(TENSORS) - 1
    late.join(10)
    assert not late.is_alive()


def test_damage_on_the_way_is_found(exchanges, courier) -> None:
    pieces = staged(TENSORS)
    pieces[2] = pieces[2]._replace(payload=memoryview(bytes([6, *pieces[2].payload[1:]])))
    for rank, exchange in enumerate(exchanges):
        exchange.weights.stage(0, {i: piece for i, piece in pieces.items() if i % 2 == rank}, None, nullcontext())
    with pytest.raises(RunFailed, match="version 0 of scalar arrived damaged"):
        list(courier.fetch(0, len(TENSORS), None))


def test_deliveries_are_taken_once_all_are_there(exchanges, courier) -> None:
    assert courier.holder == 1
    other = Courier([exchange.address for exchange in exchanges], 1, lambda: None)
    courier.deliver("step", 4, b"late step")
    other.deliver("step", 3, b"of one")
    courier.deliver("step", 3, b"of five")
    assert exchanges[1].take("step", 3, [1, 5]) == {1: b"of one", 5: b"of five"}
    assert exchanges[1].take("step", 4, [5]) == {5: b"late step"}
    other.close()


def test_only_listed_keys_are_served(tmp_path: Path) -> None:
    ours, foreign = (sidecar_keys.make(tmp_path / name) for name in ("ours", "foreign"))
    with closing(Exchange("tcp://127.0.0.1", HostKeys.load(ours))) as exchange:
        stage([exchange], 0)
        with closing(Courier([exchange.address], 0, lambda: None, ClientKeys.load(ours))) as known:
            assert len(list(known.fetch(0, len(TENSORS), None))) == len(TENSORS)
        for keys in (None, ClientKeys(ClientKeys.load(ours).server, ClientKeys.load(foreign).secret)):
            with sockets.context() as context, context.socket(zmq.DEALER) as stranger:
                if keys is not None:
                    keys.secure(stranger)
                stranger.connect(exchange.address)
                for _ in range(3):  # from the moment in which it is refused nothing more is taken from it
                    send(stranger, messages.Hold(0, 0, None))
                    assert not stranger.poll(300)


def test_a_courier_that_is_refused_can_be_given_up(tmp_path: Path) -> None:
    ours, foreign = (sidecar_keys.make(tmp_path / name) for name in ("ours", "foreign"))
    keys = ClientKeys(ClientKeys.load(ours).server, ClientKeys.load(foreign).secret)
    with (
        closing(Exchange("tcp://127.0.0.1", HostKeys.load(ours))) as exchange,
        closing(Courier([exchange.address], 0, lambda: None, keys)) as courier,
    ):
        time.sleep(0.5)  # by now it is refused
        fetching = in_background("fetch", lambda: list(courier.fetch(0, 1, None)))
        assert not wait([fetching], 0.5).done
        courier.give_up()
        with pytest.raises(RunFailed, match="nobody waits any longer"):
            fetching.result(patient(5))


def test_groups_travel_whole() -> None:
    step = AgentStep("you moved", -0.1, 2**64 - 1, "left", {"valid": 1.0}, "board")
    turns = (
        Turn(array("i", [1, 2]), array("i", [3]), array("f", [-0.5]), array("i", [7]), "stop", "text", None, step),
        Turn(array("i"), array("i", [4]), array("f", [-1.5]), array("i", [8]), "length", "", CandidateIds(
            array("i", [2]), array("i", [4, 9])
        )),
    )  # fmt: skip
    verdict = Verdict("ok", 0.5, {"right": 1.0}, "why", "")
    prompt = Prompt("9f", (Message("user", "2+2?"),), "math", "4", {"level": 3, "tags": ["a"]})
    groups = [Group(prompt, 11, (Sample(11, 0, turns, verdict, False, 3, False), Sample(11, 1, turns, verdict)))]
    assert unpack_groups(pack(groups)) == groups
    with pytest.raises(msgspec.MsgspecError):
        unpack_groups(pack(groups)[:-1])
