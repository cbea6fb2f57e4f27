"""Layouts through the real door: same tokens, and the same gradient as one rank."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.models import EXPERTS

SETTINGS = (*EXACT, "steps=2", "policy.lr=1e-5", "eval.every=0", "rollout.over_sample=0")
SIZES = {
    "smollm2": ("llama", {"tie": True, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS["qwen3_moe"]),
}


MORE = [("smollm2", 3, "train.tp=3"), ("qwen2", 2, "train.tp=2"), ("qwen2", 2, "train.cp=2")]
MORE += [("qwen3_moe", 2, "train.ep=2"), ("qwen3_moe", 4, "train.tp=2 train.ep=4")]
CASES = [
    ("qwen2", 4, "train.tp=2"),
    ("qwen2", 4, "train.dp_replicate=2"),
    ("smollm2", 2, "train.cp=2"),
    ("qwen3_moe", 2, "train.ep=2 policy.router_replay=true"),
    ("qwen2", 2, "train.pp=2"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
]
"""`tests/dist/test_train_parity` has every model in every layout."""


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> dict[str, Toy]:
    return {
        name: Toy(tmp_path_factory.mktemp(name), kind, head_dim=8, intermediate_size=96, **sizes)
        for name, (kind, sizes) in SIZES.items()
    }


@pytest.fixture(scope="module")
def alone(toys) -> Callable[[str], Running]:
    """A model's run on one rank."""
    return cache(lambda model: toys[model].run(*SETTINGS, ranks=0, name="alone"))


@pytest.mark.parametrize(("model", "ranks", "layout"), CASES)
def test_no_layout_changes_the_gradient(toys, alone, model: str, ranks: int, layout: str) -> None:
    toy, expected = toys[model], alone(model)
    run = toy.run(*SETTINGS, *layout.split(), ranks=ranks, name=f"{ranks} ranks, {layout}")
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert run.metrics()[1][key] == pytest.approx(expected.metrics()[1][key], rel=1e-4, abs=1e-6), key
    assert expected.metrics()[1]["actor/grad_norm"] > 0.01
    if "replay" in layout:
        assert run.metrics()[1]["moe/replayed"] > 0.05 and run.metrics()[1]["moe/replay_changed"] < 0.01
    ids = [[[turn["token_ids"] for turn in row["turns"]] for row in one.samples(1)] for one in (run, expected)]
    assert ids[0] == ids[1]
    weights, wanted = run.weights(2), expected.weights(2)
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((weights[name] - tensor).norm() / tensor.norm()) < 1e-4, name


def test_heads_that_cannot_be_shared_are_one_line(toys) -> None:
    run = toys["smollm2"].start(*SETTINGS, "train.tp=2", ranks=2, name="refused")
    assert run.wait() != 0
    assert "train.tp: 2 ranks cannot share the 9 heads and 3 key-value heads" in run.text()
