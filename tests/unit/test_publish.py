"""The weight road in one process: what arrives is proven, and each way it can go wrong stops the run."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import solo
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.weights import probe
from tests.models import tiny

Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))


class Policy:
    """A trainer without training, alone: a whole model, and a road that a test may break."""

    layout, sees = SimpleNamespace(data=SimpleNamespace(rank=0, size=1)), False

    def __init__(self, path, dtype, road=lambda weights: weights):
        self.model, self.road = build_model(path, dtype, "cpu"), road
        self.taken = 0

    def weights(self):
        for name, tensor in self.road(list(self.model.named_parameters())):
            self.taken += 1
            yield name, tensor.detach()

    def logprobs(self, batch, temperature):
        out = torch.zeros(batch.num_tokens)
        if batch.num_tokens:
            with torch.no_grad():
                at = batch.loss_mask.nonzero()[:, 0]
                ids, positions = batch.token_ids[None], batch.position_ids[None]
                logits = self.model(ids, position_ids=positions, packing=Packing.of(batch.starts)).logits[0]
                out[at] = torch.log_softmax(logits[at - 1].float() / temperature, -1)[
                    range(len(at)), batch.token_ids[at]
                ]
        return out, torch.zeros_like(out)

    def awake(self):
        return nullcontext()


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "tied"])
def path(request, tmp_path_factory):
    tied = request.param == "tied"
    return tiny("llama" if tied else request.param, tmp_path_factory.mktemp("model"), tie=tied)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def world():
    with solo() as world:
        yield world


def native(path, dtype=torch.float32, kind=NativeEngine):
    return kind(empty_module(path, dtype), max_running=8, kv_tokens=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive(path, world, dtype):
    policy, engine = Policy(path, dtype), native(path, dtype)
    metrics = weights.build(policy, engine, world)(version=3)
    held = dict(engine.loaded_weights())
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert metrics["publish/bytes"] == sum(tensor.nbytes for tensor in held.values())
    assert metrics["publish/probe_abs_diff"] < (1e-5 if dtype == torch.float32 else 0.02)
    parts = ("gather", "copy", "hash", "probe")
    assert sum(metrics[f"publish/{part}_seconds"] for part in parts) == pytest.approx(
        metrics["publish/seconds"], rel=0.05
    )
    assert "publish" in world.journal.take_times() and world.journal.progress > len(held)
    assert engine.num_unfinished == 0 and engine.pool.num_used == 0


def fails(policy, engine, world, *words):
    """The second publish fails with these words; the first, unbroken, has passed."""
    with pytest.raises(RunFailed) as caught:
        weights.build(policy, engine, world)(version=2)
    assert str(caught.value).startswith("publish of version 2, rank 0: ")
    for word in words:
        assert word in str(caught.value)


def exchange(weights, a=Q0, b=Q1):
    found = dict(weights)
    return [(name, found[{a: b, b: a}.get(name, name)]) for name, _ in weights]


ROADS = {
    "skipped": (lambda weights: [w for w in weights if w[0] != Q1], [Q1, "missing"]),
    "twice": (lambda weights: [*weights, weights[0]], ["model.embed_tokens.weight", "twice"]),
    "exchanged": (exchange, ["from the trainer's on average"]),
    "stranger": (lambda weights: [*weights, ("model.bias", torch.zeros(3))], ["model.bias", "unknown"]),
}


@pytest.mark.parametrize("fault", ROADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_hands_over_the_wrong_thing(tmp_path, world, fault, dtype):
    road, words = ROADS[fault]
    # Two layers that differ as those of a trained model do; at the usual random scale they would hardly matter.
    path = tiny("llama", tmp_path, initializer_range=0.3)
    policy, engine = Policy(path, dtype, road), native(path, dtype)
    fails(policy, engine, world, *words)
    assert policy.taken == len(road(list(policy.model.named_parameters()))), "the road must be walked to its end"


class Skips(NativeEngine):
    """Leaves one tensor as it was."""

    def load(self, weights, version):
        old = dict(self.loaded_weights())[Q1].clone()
        super().load(weights, version)
        dict(self.loaded_weights())[Q1].copy_(old)


class Exchanges(NativeEngine):
    """Stores two tensors under each other's name."""

    def load(self, weights, version):
        super().load(weights, version)
        held = dict(self.loaded_weights())
        held[Q0].data, held[Q1].data = held[Q1].data, held[Q0].data


class Stale(NativeEngine):
    """Takes the weights, and goes on serving those of before; the first load is honest."""

    first = None

    def load(self, weights, version):
        given = [(name, tensor.clone()) for name, tensor in weights]
        self.first = self.first or given
        super().load(self.first, version)


class Flips(NativeEngine):
    """One bit of one element."""

    def load(self, weights, version):
        super().load(weights, version)
        dict(self.loaded_weights())["model.norm.weight"].data.view(torch.uint8)[5] ^= 1


class Loses(NativeEngine):
    """Forgets a name."""

    def loaded_weights(self):
        return ((name, tensor) for name, tensor in super().loaded_weights() if name != Q0)


class Old(NativeEngine):
    """Stamps its tokens with an old version."""

    def load(self, weights, version):
        super().load(weights, version - 1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Skips, ["other bytes", Q1]),
        (Exchanges, ["other bytes", Q0]),
        (Stale, ["other bytes", "model.embed_tokens.weight"]),
        (Flips, ["other bytes", "model.norm.weight"]),
        (Loses, [Q0]),
        (Old, ["serves version 1"]),
    ],
)
def test_an_engine_that_holds_something_else(llama, world, kind, words):
    engine = native(llama, kind=kind)
    engine.load(build_model(llama, torch.float32, "cpu").named_parameters(), version=1)
    policy = Policy(llama, torch.float32)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.01)  # an update
    fails(policy, engine, world, *words)


class Hidden(Stale):
    """Keeps its tensors to itself: only the probe can tell."""

    def loaded_weights(self):
        return ((name, None) for name, _ in super().loaded_weights())


def test_the_probe_alone_finds_stale_weights(llama, world):
    engine, policy = native(llama, kind=Hidden), Policy(llama, torch.float32)
    publish = weights.build(policy, engine, world)
    publish(version=1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.01)
    fails(policy, engine, world, "from the trainer's on average (limit 0.0003)")


@pytest.mark.parametrize(("every", "probed"), [(1, range(5, 12)), (3, [5, 6, 9]), (0, [5])])
def test_the_first_publish_is_probed_and_then_every_nth(llama, world, every, probed):
    publish = weights.build(Policy(llama, torch.float32), native(llama), world, every)
    metrics = {version: publish(version) for version in range(5, 12)}
    assert [version for version, found in metrics.items() if "publish/probe_abs_diff" in found] == list(probed)
    assert all("publish/probe_seconds" in found for found in metrics.values())


def test_bytes_are_compared_in_a_publish_that_is_not_probed(llama, world):
    policy, engine = Policy(llama, torch.float32), native(llama, kind=Stale)
    publish = weights.build(policy, engine, world, 0)
    publish(version=1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.01)
    with pytest.raises(RunFailed, match="publish of version 2, rank 0: the engine holds other bytes"):
        publish(version=2)


class Biased(NativeEngine):
    """Takes a buffer too, which it keeps in a form of its own."""

    def load(self, weights, version):
        super().load([(name, tensor) for name, tensor in weights if name != "bias"], version)

    def loaded_weights(self):
        return (*super().loaded_weights(), ("bias", None))


def test_a_buffer_in_a_dtype_of_its_own_does_not_sharpen_the_probe(llama, world):
    road = lambda weights: [*weights, ("bias", torch.zeros(3))]  # noqa: E731  buffers come last
    policy, engine = Policy(llama, torch.bfloat16, road), native(llama, torch.bfloat16, Biased)
    exact = policy.logprobs
    policy.logprobs = lambda *args, **how: (exact(*args, **how)[0] + 0.01, None)
    metrics = weights.build(policy, engine, world)(version=1)
    assert 3e-4 < metrics["publish/probe_abs_diff"] < 0.2


def test_not_a_number_is_found_by_the_probe(llama, world):
    policy, engine = Policy(llama, torch.float32), native(llama)
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(float("nan"))
    fails(policy, engine, world, "nan")


def test_a_failed_publish_serves_no_token_where_weights_lack(llama, world):
    engine = native(llama)
    fails(Policy(llama, torch.float32, ROADS["skipped"][0]), engine, world)
    with pytest.raises(AssertionError, match="no weights"):
        probe.ask(engine, 2)


def test_publishing_again_and_again(llama, world):
    policy, engine = Policy(llama, torch.float32), native(llama)
    publish = weights.build(policy, engine, world)
    assert all(publish(version=v)["publish/probe_abs_diff"] < 1e-5 for v in range(3))
