"""Pipelines of several chunks a stage, on ranks: parity with plain torch, messages, checkpoints across layouts."""

from collections.abc import Callable

import pytest
import torch

from spmd_rl.distributed import World
from tests.dist.harness import run_ranks
from tests.dist.test_bytes import Traffic
from tests.dist.test_pipeline_ranks import passed_on, trained
from tests.dist.test_train_parity import COPIES, FEW_HEADS, LIMITS, SIZES, critics, gradients, three_updates
from tests.dist.test_train_state import weights
from tests.models import EXPERTS, tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, relative, share_of

PP2, VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2}
CASES = [("dealt", 50, "full"), ("uneven", 25, "selective"), ("last shard alone", 10_000, "none")]
"""Share, micro-batch budget, activation checkpointing: several micro-batches, an odd number of them, and one."""


def errors(world: World, path: str, axes: dict[str, int], cases: list) -> dict[str, dict[str, float]]:
    return {
        f"{dtype} {case}": gradients(world, backend, path, axes, dtype, case)
        for case in cases
        for dtype in (("float64",) if "experts" in path else LIMITS)
    }


def assert_parity(found: dict[str, dict[str, float]], note: Callable[[str, float], None]) -> None:
    for case, numbers in found.items():
        worst = max(numbers, key=numbers.get)
        note(case, numbers[worst])
        assert numbers[worst] < LIMITS[case.split()[0]], (case, worst, numbers[worst])


def compared(world: World, path: str) -> dict:
    """Errors of a gradient; logprobs, an update and its messages, with one chunk a stage and with two."""
    found = {"errors": errors(world, path, VPP2, CASES[1:2])}
    for name, axes in (("one", PP2), ("two", VPP2), ("gathered again", VPP2 | {"reshard_after_forward": True})):
        role = backend(world, path, budget=25, axes=axes)
        share = share_of(role, "dealt", global_batch())
        told = [tensor.tolist() for tensor in role.logprobs(share, TEMPERATURE)]
        with Traffic() as traffic:
            metrics = role.update(share, loss, TEMPERATURE)
        told += [metrics["loss"], metrics["num_microbatches"]]
        found[name] = [told, metrics["grad_norm"], weights(role).tolist(), traffic.calls, traffic.bytes]
    return found


def test_two_chunks_a_stage_compute_what_one_does(tmp_path, record_property) -> None:
    path = tiny("llama", tmp_path, tie=True, num_hidden_layers=4)
    messages, num_bytes = {"one": 0, "two": 0}, {"one": 0, "two": 0}
    for found in run_ranks(2, compared, str(path), timeout=200):
        assert_parity(found.pop("errors"), record_property)
        (told, norm, after, *_), (_, again, then, *_) = found["one"], found["two"]
        assert all(facts[0] == told for facts in found.values())  # to the bit
        assert abs(again / norm - 1) < 1e-12 and relative(torch.tensor(then), torch.tensor(after)) < 1e-7
        assert found["gathered again"][1:3] == [again, then]
        for name in messages:
            messages[name] += found[name][3]["send"]
            num_bytes[name] += found[name][4]["send"]
            assert found[name][3].keys() == found["one"][3].keys()
    count = told[-1]
    assert count % 2 == 1 and count > 2
    # from chunk to chunk and back: of four chunks there are three meetings, of two there is one
    assert messages == {"one": 2 * count, "two": 6 * count}
    assert num_bytes["two"] == 3 * num_bytes["one"]


@pytest.mark.slow
@pytest.mark.parametrize(("other", "alone"), [(PP2, 2), ({}, 1)])
def test_a_checkpoint_goes_to_other_chunks_and_back_to_the_bit(other, alone: int, tmp_path) -> None:
    kind = {"tie": True, "num_hidden_layers": 5}
    path, another = str(tiny("llama", tmp_path / "a", **kind)), str(tiny("llama", tmp_path / "b", seed=1, **kind))
    one, two, three = (str(tmp_path / f"dcp-{i}") for i in range(3))
    wanted = run_ranks(2, trained, path, one, VPP2, timeout=150)
    between = run_ranks(alone, passed_on, another, one, two, other, timeout=150)
    back = run_ranks(2, passed_on, another, two, three, VPP2, timeout=150)
    assert [found for found, _ in back] == wanted
    wholes = [torch.tensor(whole) for _, whole in (*between, *back)]
    assert max(float((whole - wholes[0]).norm() / wholes[0].norm()) for whole in wholes) < 1e-5


LARGE = [
    ("llama", 4, VPP2),
    ("llama", 4, VPP2 | {"tp": 2}),
    ("qwen3", 4, VPP2 | {"cp": 2}),
    ("llama", 4, VPP2 | COPIES),
    ("qwen3_moe", 4, VPP2 | {"ep": 2}),
    ("qwen3_moe", 4, VPP2 | {"tp": 2, "ep": 1}),
    ("llama", 2, {"pp": 2, "vpp": 3}),
    ("qwen2", 3, {"pp": 3, "vpp": 2}),
    ("llama", 4, {"pp": 4, "vpp": 2}),
]


def followed(world: World, path: str) -> list:
    three = three_updates(world, "fsdp2", path, VPP2)
    return [errors(world, path, VPP2, CASES), three, critics(world, [path], VPP2)]


@pytest.mark.slow
def test_updates_of_chunks_follow_plain_torch(tmp_path, record_property) -> None:
    path = tiny("llama", tmp_path, num_hidden_layers=4)
    for found, (drift, logprobs, entropy), values in run_ranks(2, followed, str(path), timeout=200):
        assert_parity(found, record_property)
        assert drift < 1e-5 and max(logprobs, entropy) < 1e-4
        assert len(values) == 7 and max(values) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "axes"), LARGE, ids=str)
def test_chunks_with_other_axes(kind: str, size: int, axes: dict[str, int], tmp_path, record_property) -> None:
    sizes = {"tie": True} if kind == "llama" else EXPERTS["qwen3_moe"] | {"num_experts": 6} if "moe" in kind else {}
    heads = SIZES | FEW_HEADS | {"num_hidden_layers": 4 if axes["pp"] * axes["vpp"] == 4 else 9}
    path = tiny(kind, tmp_path / ("experts" if "moe" in kind else "dense"), **heads, **sizes)
    per_machine = size // axes.get("dp_replicate", 1)
    for found in run_ranks(size, errors, str(path), axes, CASES, per_machine=per_machine, timeout=280):
        assert_parity(found, record_property)
