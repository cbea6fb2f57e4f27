"""The weight road between training and generating ranks: deltas where both ends have the same base, else whole."""

import tempfile
from contextlib import ExitStack, closing, nullcontext

import msgspec
import pytest
import torch

from spmd_rl.config.schema import EvalConfig, PublishConfig, RlvrConfig
from spmd_rl.distributed import solo
from spmd_rl.errors import RunFailed
from spmd_rl.split import GenerateSide, Generator
from spmd_rl.split.client import TrainerClient
from spmd_rl.split.messages import News
from spmd_rl.weights import Local, Publisher, Served, messages
from spmd_rl.weights.delta import DeltaBase
from spmd_rl.weights.staged import Delta, Staged, with_delta
from tests.models import tiny
from tests.servers import connect, serve
from tests.unit.test_publish import Q1, Policy, native


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"))


class Road:
    """A training rank and the generating ranks that a test asks for, all in this process."""

    def __init__(self, model, stack: ExitStack, delta: bool = True) -> None:
        self.model, self._stack = model, stack
        self.world = stack.enter_context(solo())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        (server,) = serve(folder)
        self.server, self.newest = stack.enter_context(closing(server)), b""
        self.policy = Policy(model, torch.bfloat16)
        self.cfg = RlvrConfig(steps=1, eval=EvalConfig(every=0), publish=PublishConfig(probe_every=0, delta=delta))
        parts = self.server.weights, self.world, self.announce, lambda version: {}  # no engine elsewhere is probed
        self.served = Served(*parts, deltas=delta)
        self.publish = Publisher(self.policy, self.world, [self.served], probe_every=0)

    def announce(self, announcement: messages.Announcement) -> None:
        self.newest = msgspec.msgpack.encode(announcement)

    def generator(self, member: int = 0) -> "Rank":
        client = connect([self.server.address], member, progress=self.world.progress, stack=self._stack)
        return Rank(self, native(self.model, torch.bfloat16), client)

    def update(self) -> None:
        """Change a few elements of one weight; one of them is 0.0 and -0.0 by turns."""
        weight = dict(self.policy.model.named_parameters())[Q1]
        with torch.no_grad():
            weight[0, 0] = 0.0 if weight[0, 0].signbit() else -0.0
            weight[3, 5:9] += 0.25


class Rank:
    """A generating rank."""

    def __init__(self, road: Road, engine, client: TrainerClient) -> None:
        self._road, self._engine, self._client = road, engine, client
        self._generator = Generator(road.cfg, engine, GenerateSide(road.world, client, lambda: client, road.world))

    def follow(self, version: int) -> int:
        """Load this version, which must be what the policy is; the bytes that came."""
        self._client.link.news = News(True, oldest=version, newest=self._road.newest, over=True)
        self._generator.run(None)  # nothing is generated
        held, given = dict(self._engine.loaded_weights()), dict(self._road.policy.weights())
        assert held.keys() == given.keys()
        assert all(torch.equal(held[name].view(torch.int16), given[name].view(torch.int16)) for name in given)
        return self._client.num_bytes


@pytest.fixture
def road(llama):
    with ExitStack() as stack:
        yield Road(llama, stack)


def test_who_has_the_version_before_fetches_what_has_changed(road):
    first, late = road.generator(0), road.generator(1)
    metrics = road.publish(1)
    whole = metrics["publish/bytes"]
    assert first.follow(1) == whole and "publish/delta_bytes" not in metrics
    for version in (2, 3):
        road.update()
        metrics = road.publish(version)
        assert first.follow(version) == metrics["publish/delta_bytes"] < 0.01 * whole
        assert metrics["publish/delta_share"] == metrics["publish/delta_bytes"] / whole
    assert late.follow(3) == whole  # it had nothing
    for version in (4, 5):
        road.update()
        metrics = road.publish(version)
    assert first.follow(5) == whole  # it has missed version 4
    metrics = road.publish(6)  # the same weights again
    assert first.follow(6) == metrics["publish/delta_bytes"] == len(list(road.policy.weights()))  # a byte for each


def test_without_deltas_all_of_it_travels(llama):
    with ExitStack() as stack:
        road = Road(llama, stack, delta=False)
        rank = road.generator()
        for version in (1, 2):
            metrics = road.publish(version)
            assert rank.follow(version) == metrics["publish/bytes"] and "publish/delta_bytes" not in metrics


def test_one_pass_reaches_an_engine_here_and_those_that_fetch(road):
    here, there = native(road.model, torch.bfloat16), road.generator()
    publish = Publisher(road.policy, road.world, [road.served, Local(here, road.world)])
    for version in (1, 2):
        road.update()
        road.policy.taken = 0
        metrics = publish(version)
        given = dict(road.policy.model.named_parameters())
        assert road.policy.taken == len(given), "gathered once"
        assert all(torch.equal(held, given[name]) for name, held in here.loaded_weights())
        there.follow(version)
    assert metrics["publish/probe_abs_diff"] < 0.02 and metrics["publish/delta_share"] < 0.01


def test_a_weight_that_is_lost_stops_the_run(road):
    rank = road.generator()
    road.publish(1)
    rank.follow(1)
    road.policy.road = lambda weights: [weight for weight in weights if weight[0] != Q1]
    road.publish(2)
    with pytest.raises(RunFailed, match=f"{Q1} is missing"):
        rank.follow(2)


class Exchanging:
    """Two training ranks that share out three weights, and one that fetches them; what they are is up to a test."""

    waiting = nullcontext()

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.servers = [stack.enter_context(closing(server)) for server in serve(folder, 2)]
        self.client = connect([server.address for server in self.servers], stack=stack)
        self.held = DeltaBase()
        self.stage(1, pieces(1), None)
        self.fetched = self.fetch(1)
        self.held.complete(1, bytes(16))
        self.base = self.held.version

    def stage(self, version: int, found: dict[int, Staged], base: messages.Base | None) -> None:
        for rank, server in enumerate(self.servers):
            share = {index: piece for index, piece in found.items() if index % 2 == rank}
            server.weights.stage(version, share, base, self.waiting)

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor, _ in self.client.fetch(version, 3, self.held)}


@pytest.fixture
def exchanging():
    with ExitStack() as stack:
        yield Exchanging(stack)


def pieces(version: int, before: dict[int, Staged] | None = None) -> dict[int, Staged]:
    """Three weights; from version to version two elements of the first change, none of the second, all of the last."""
    found = {}
    for index, name in enumerate("abc"):
        tensor = torch.arange(1000).to(torch.int16)
        if name == "a":
            tensor[version] = -1
        if name == "c":
            tensor += version
        data = memoryview(bytes(tensor.view(torch.uint8).numpy()))
        piece = Staged(name, "bfloat16", [10, 100], data, messages.digest(data))
        found[index] = with_delta(piece, (before or {}).get(index))
    return found


def assert_version(found: dict[str, torch.Tensor], version: int) -> None:
    expected = {piece.name: bytes(piece.payload) for piece in pieces(version).values()}
    assert {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in found.items()} == expected


def test_what_is_no_smaller_comes_whole_and_nothing_is_written_over(exchanging):
    exchanging.stage(2, pieces(2, pieces(1)), exchanging.base)
    assert_version(exchanging.fetch(2), 2)
    assert exchanging.client.num_bytes == (1 + 2 * 3) + 1 + 2000
    assert_version(exchanging.fetched, 1)  # an engine may still look at it


@pytest.mark.parametrize(
    "base",
    [messages.Base(1, b"x" * 16), messages.Base(0, bytes(16)), None],
    ids=["another version 1", "an older version", "none"],
)
def test_a_trainer_refuses_deltas_of_another_base(exchanging, base):
    exchanging.stage(2, pieces(2, pieces(1)), exchanging.base)
    exchanging.held.version = base
    assert_version(exchanging.fetch(2), 2)
    assert exchanging.client.num_bytes == 3 * 2000


def test_one_trainer_without_the_base_is_enough_to_fetch_all(exchanging):
    exchanging.stage(2, pieces(2, pieces(1)), exchanging.base)
    exchanging.servers[1].weights.stage(2, {1: pieces(2)[1]}, None, exchanging.waiting)
    assert_version(exchanging.fetch(2), 2)
    assert exchanging.client.num_bytes == 3 * 2000


def test_what_was_not_fetched_to_its_end_is_no_base(exchanging):
    exchanging.stage(2, pieces(2, pieces(1)), exchanging.base)
    next(exchanging.client.fetch(2, 3, exchanging.held))
    assert exchanging.held.version is None


def test_a_copy_that_has_changed_since_is_found(exchanging):
    exchanging.fetched["b"].view(torch.uint8)[0, 5] ^= 1
    exchanging.stage(2, pieces(2, pieces(1)), exchanging.base)
    with pytest.raises(RunFailed, match="version 2 of b is a delta of other bytes than are here"):
        exchanging.fetch(2)


def flipped(delta: Delta) -> Delta:
    """On its way: what the trainer says of it is true."""
    return delta._replace(payload=delta.payload[:-1] + bytes([delta.payload[-1] ^ 1]))


def misled(delta: Delta) -> Delta:
    """Wrong from the start."""
    payload = flipped(delta).payload
    return delta._replace(payload=payload, digest=messages.digest(payload))


def shortened(delta: Delta) -> Delta:
    payload = delta.payload[:-1]
    return delta._replace(payload=payload, digest=messages.digest(payload))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flipped, "version 2 of a arrived damaged"),
        (misled, "version 2 of a: its delta leads to other bytes"),
        (shortened, "bytes too many, or too few"),
    ],
)
def test_damage_is_found_before_an_engine_sees_it(exchanging, damage, words):
    found = pieces(2, pieces(1))
    found[0] = found[0]._replace(delta=damage(found[0].delta))
    exchanging.stage(2, found, exchanging.base)
    with pytest.raises(RunFailed, match=words):
        exchanging.fetch(2)
