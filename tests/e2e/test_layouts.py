"""Layouts through the real door, with each engine: same tokens, and the same gradient and weights as on one rank."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.tools.convert import main
from tests.e2e.runs import EXACT, Running, Toy
from tests.engines import VLLM_SIZES, needs_sglang, needs_vllm
from tests.models import EXPERTS, HYBRID

HUGE, SCALE = 1e12, 100.0
SETTINGS = (*EXACT, "eval.every=0", "rollout.over_sample=0", "policy.warmup_steps=0", "policy.schedule=constant")
ONE_STEP = ("steps=1", f"policy.eps={HUGE}", f"policy.lr={SCALE * HUGE}", f"policy.max_grad_norm={HUGE}")
ONE_STEP = (*SETTINGS, *ONE_STEP, "policy.weight_decay=0")
"""With an epsilon far above any gradient AdamW's first step is lr / eps times the gradient: it is read off the weights.
A float32 weight rounds away what is much smaller than itself, hence the scale."""
TWO_STEPS = (*SETTINGS, "steps=2", "policy.lr=1e-2", "policy.eps=1e-3")
"""The epsilon hides gradients that are rounding alone, of which AdamW would make whole steps."""
SAME, EXACTLY = 1e-4, 1e-5
"""Relative errors that are allowed: of the first step's numbers, and of each tensor in the L2 norm."""
NINE_HEADS = {"tie": True, "num_attention_heads": 9, "num_key_value_heads": 3}
SIZES = {
    "smollm2": ("llama", {**NINE_HEADS, "hidden_size": 72}),
    "qwen2": ("qwen2", {}),
    "four_layers": ("llama", {"tie": True, "num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", EXPERTS["qwen3_moe"]),
    "hybrid": ("qwen3_5_text", HYBRID),
}
OF_VLLM = {name: (kind, VLLM_SIZES | sizes) for name, (kind, sizes) in SIZES.items()}
OF_VLLM["smollm2"] = "llama", {**NINE_HEADS, **VLLM_SIZES, "hidden_size": 288}
SMALL = {name: (kind, {"head_dim": 8} | sizes) for name, (kind, sizes) in SIZES.items()}
OF_SGLANG = SMALL | {"qwen2": SIZES["qwen2"]}  # whose heads it takes to be as wide as hidden size / heads
TOYS = {"native": SMALL, "vllm": OF_VLLM, "sglang": OF_SGLANG}

QUICK = [
    ("smollm2", 2, ""),
    ("smollm2", 2, "train.cp=2"),
    ("smollm2", 2, "train.pp=2"),
    ("smollm2", 3, "train.tp=3"),
    ("qwen3_moe", 2, "train.ep=2 policy.router_replay=true"),
    ("hybrid", 2, ""),
]
SLOW = [
    ("qwen2", 2, "train.tp=2"),
    ("qwen2", 2, "train.cp=2"),
    ("qwen2", 2, "train.pp=2"),
    ("four_layers", 2, "train.pp=2 train.vpp=2"),
    ("four_layers", 4, "train.pp=2 train.vpp=2 train.tp=2"),
    ("qwen2", 4, "train.tp=2"),
    ("qwen2", 4, "train.dp_replicate=2"),
    ("qwen2", 4, "train.tp=2 train.pp=2"),
    ("qwen2", 4, "train.cp=2"),
    ("qwen3_moe", 2, "train.ep=2"),
    ("qwen3_moe", 4, "train.ep=2 train.pp=2"),
    ("qwen3_moe", 4, "train.tp=2 train.ep=4"),
    ("hybrid", 2, "train.pp=2"),
    ("hybrid", 2, "train.tp=2"),
    ("hybrid", 2, "train=deepspeed"),
    ("hybrid", 2, "train.activation_checkpointing=full"),
    ("smollm2", 2, "train=deepspeed"),
    ("qwen3_moe", 3, "train=deepspeed train.stage=2 train.offload_optimizer=true"),
    ("smollm2", 2, "train=megatron train.pp=2"),
    ("qwen2", 4, "train=megatron train.tp=2"),
    ("qwen3_moe", 2, "train=megatron train.ep=2"),
]
WITH_VLLM = [
    ("smollm2", 3, "train.tp=3"),
    ("qwen2", 2, "train.cp=2"),
    ("qwen2", 2, "train.pp=2"),
    ("qwen2", 2, "train.pp=2 engine.tp=2"),
    ("qwen3_moe", 2, "train.ep=2"),
    ("qwen2", 2, "train=deepspeed train.stage=1"),
    ("qwen2", 2, "train=megatron train.tp=2"),
    ("qwen2", 2, "train=megatron train.pp=2 engine.tp=2"),
]
WITH_SGLANG = [
    ("smollm2", 3, "train.tp=3"),
    ("qwen2", 2, "train.pp=2 engine.tp=2"),
    ("qwen3_moe", 2, "train.ep=2 policy.router_replay=true"),
    ("qwen3_moe", 2, "policy.router_replay=true engine.tp=2"),
]
slow = pytest.mark.slow
GRADIENTS = [*QUICK, *(pytest.param(*case, marks=slow) for case in SLOW)]
WEIGHTS = [pytest.param("native", *case, marks=slow) for case in (*QUICK, *SLOW)]
WEIGHTS += [pytest.param("vllm", *case, marks=(slow, needs_vllm, pytest.mark.timeout(900))) for case in WITH_VLLM]
WEIGHTS += [pytest.param("sglang", *case, marks=(slow, needs_sglang, pytest.mark.timeout(900))) for case in WITH_SGLANG]
"""`tests/dist/test_train_parity` has every model in every layout."""


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str, str], Toy]:
    """By engine and model."""

    @cache
    def made(engine: str, model: str) -> Toy:
        kind, sizes = TOYS[engine][model]
        return Toy(tmp_path_factory.mktemp(f"{engine}-{model}"), kind, intermediate_size=96, **sizes)

    return made


@pytest.fixture(scope="module")
def alone(toys) -> Callable[..., Running]:
    """A model's run on one rank, with the given settings."""
    return cache(lambda engine, model, *settings: done(toys(engine, model), engine, *settings, ranks=0, layout=""))


def done(toy: Toy, engine: str, *settings: str, ranks: int, layout: str) -> Running:
    steps = next(setting for setting in settings if setting.startswith("steps="))
    name = f"{ranks} ranks, {layout}, {steps}"
    run = toy.start(*settings, f"engine={engine}", *layout.split(), ranks=ranks, name=name)
    assert run.wait(400) == 0, run.text()[-3000:]
    return run


def tokens(run: Running) -> list:
    """Prompt and token ids of the first step's samples."""
    return [(s["ticket"], s["answer"], s["id"], [t["token_ids"] for t in s["turns"]]) for s in run.samples(1)]


def assert_same_first_step(run: Running, expected: Running, layout: str) -> None:
    assert len(tokens(run)) >= 16 and tokens(run) == tokens(expected)
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert run.metrics()[1][key] == pytest.approx(expected.metrics()[1][key], rel=SAME, abs=1e-6), key
    assert expected.metrics()[1]["actor/grad_norm"] > 0.01
    assert run.metrics()[1]["train_infer/abs_diff/mean"] < 1e-4
    if "replay" in layout:
        assert run.metrics()[1]["moe/replayed"] > 0.05 and run.metrics()[1]["moe/replay_changed"] < 0.01


def largest(errors: dict, wanted: dict) -> float:
    """The largest relative error of a tensor, in the L2 norm."""
    assert errors.keys() == wanted.keys()
    return max(float(error.norm() / wanted[name].norm()) for name, error in errors.items())


@pytest.mark.parametrize(("model", "ranks", "layout"), GRADIENTS)
def test_every_layout_has_the_tokens_and_the_gradient_of_one_rank(
    toys, alone, model: str, ranks: int, layout: str, tmp_path, record_property: Callable
) -> None:
    """Guarantee S. And a checkpoint of every layout converts to what the run exports."""
    toy, expected = toys("native", model), alone("native", model, *ONE_STEP)
    run = done(toy, "native", *ONE_STEP, ranks=ranks, layout=layout)
    assert_same_first_step(run, expected, layout)
    start, here, there = load_file(toy.model / "model.safetensors"), run.weights(1), expected.weights(1)
    moved = {name: there[name] - tensor for name, tensor in start.items()}
    error = largest({name: here[name] - there[name] for name in here}, moved)
    record_property("error", error)
    assert error < EXACTLY, error
    checkpoint = run.run_dir / "checkpoints" / "step-000001"
    assert main(["to-hf", str(checkpoint), str(tmp_path / "out")]) == 0
    for file in (checkpoint / "hf").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("engine", "model", "ranks", "layout"), WEIGHTS)
def test_every_layout_ends_at_the_weights_of_one_rank(
    toys, alone, engine: str, model: str, ranks: int, layout: str, record_property: Callable
) -> None:
    expected = alone(engine, model, *TWO_STEPS)
    run = done(toys(engine, model), engine, *TWO_STEPS, ranks=ranks, layout=layout)
    assert_same_first_step(run, expected, layout)
    (before, after), wanted = (run.weights(step) for step in (1, 2)), expected.weights(2)
    drift = largest({name: after[name] - wanted[name] for name in after}, wanted)
    moved = largest({name: after[name] - before[name] for name in after}, before)
    record_property("drift", drift)
    assert drift < EXACTLY < moved / 100, (drift, moved)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_that_was_converted_and_back(toys, tmp_path) -> None:
    """A pipeline's first step to Hugging Face and into a checkpoint again; the second is bitwise that of one run."""
    toy, layout = toys("native", "smollm2"), "train.pp=2"
    straight = done(toy, "native", *TWO_STEPS, ranks=2, layout=layout)
    first = straight.run_dir / "checkpoints" / "step-000001"
    assert main(["to-hf", str(first), str(tmp_path / "hf")]) == 0
    assert main(["from-hf", str(tmp_path / "hf"), str(first), str(tmp_path / "again")]) == 0
    resume = f"checkpoint.resume={tmp_path / 'again'}"
    run = toy.run(*TWO_STEPS, "engine=native", layout, resume, ranks=2, name="from what was converted")
    ours, theirs = run.weights(2), straight.weights(2)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert not torch.equal(theirs["model.norm.weight"], straight.weights(1)["model.norm.weight"])
    assert run.samples(2) == straight.samples(2)


def test_heads_that_cannot_be_shared_are_one_line(toys) -> None:
    run = toys("native", "smollm2").start(*SETTINGS, "train.tp=2", ranks=2, name="refused")
    assert run.wait() != 0
    assert "train.tp: 2 ranks cannot share the 9 heads and 3 key-value heads" in run.text()
