"""Rounding of weights on their way: the values that each format has, and what is left as it is."""

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.distributed import solo
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.weights.quantized import FORMATS, quantized
from tests.models import EXPERTS, tiny
from tests.unit.test_publish import Policy

E4M3 = sorted({s * m for e in range(16) for f in range(8) for s in (1, -1) if (e, f) != (15, 7)
               for m in [f / 8 * 2**-6 if e == 0 else (1 + f / 8) * 2 ** (e - 7)]})  # fmt: skip
"""All numbers of float8 e4m3"""


def pieces(name: str, shape: tuple[int, int]):
    """Parts of a weight that share a scale, and the largest value that the format has."""
    rows, columns = shape
    if name == "fp8":
        blocks = [(slice(r, r + 128), slice(c, c + 128)) for r in range(0, rows, 128) for c in range(0, columns, 128)]
        return blocks, 448
    step = {"int8": columns, "int4": 32}[name]
    parts = [(slice(r, r + 1), slice(c, c + step)) for r in range(rows) for c in range(0, columns, step)]
    return parts, {"int8": 127, "int4": 7}[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 50), (130, 129), (64, 64)])
def test_each_part_has_its_own_scale_and_takes_the_nearest_value(name: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0
    found = FORMATS[name](weight)
    grid = torch.tensor(E4M3 if name == "fp8" else [float(n) for n in range(-127, 128)])
    parts, largest = pieces(name, shape)
    for part in parts:
        scale = weight[part].abs().max().double() / largest
        if scale == 0:
            assert not found[part].any()
            continue
        values = grid[grid.abs() <= largest].double() * scale
        nearest = (weight[part].double()[..., None] - values).abs().amin(-1)
        error = (weight[part].double() - found[part].double()).abs()
        assert (error <= nearest + 1e-6).all()
        assert ((found[part].double()[..., None] - values).abs().amin(-1) < 1e-6).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_matrices_of_layers_alone_are_rounded(kind: str, tmp_path) -> None:
    policy = Policy(tiny(kind, tmp_path, **EXPERTS.get(kind, {})), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    after = dict(quantized(policy.weights(), "int4"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all("proj" in name for name in changed)
    assert {name for name in before if before[name].ndim == 2 and "proj" in name} <= changed
    assert dict(quantized(policy.weights(), None)).keys() == before.keys()


def test_what_an_engine_holds_is_proven_and_the_probe_knows_how_far_rounding_is_off(tmp_path) -> None:
    path = tiny("llama", tmp_path, initializer_range=0.3)
    policy, engine = Policy(path, torch.float32), NativeEngine(empty_module(path, torch.float32), 8, 512)
    with solo() as world:
        publish = weights.build(policy, engine, world, quantization="int8")
        first = publish(version=0)["publish/probe_abs_diff"]
        assert first > 3e-4, "without a limit of its own it would be refused"
        held = dict(engine.loaded_weights())
        wanted = dict(quantized(policy.weights(), "int8"))
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
        publish(version=1)
        names = [name for name, _ in policy.weights() if "layers.0" in name]
        other = {name: name.replace("layers.0", "layers.1") for name in names}
        policy.road = lambda weights: [(name, dict(weights)[other.get(name, name)]) for name, _ in weights]
        with pytest.raises(RunFailed, match="from the trainer's on average"):
            publish(version=2)
