"""Adapters in the pipelines, none of which knows of them: they learn, and their checkpoints hold nothing else."""

import pytest
from safetensors.torch import load_file

from spmd_rl.model.lora import PREFIX
from spmd_rl.train.state import MODEL, SavedState
from tests.e2e.runs import Toy
from tests.e2e.test_supervised import KINDS, measured
from tests.engines import OTHERS, VLLM_SIZES, needs_nf4

LORA = ("policy.lora.rank=8", "policy.lr=1e-2")
FALL = 0.98
"""Of a loss in four steps: adapters of a random model, whose output is frozen, learn less than all of it."""
HEAD = f"{MODEL}lm_head.weight"


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_supervised_pipelines_learn_with_adapters(name: str, tmp_path) -> None:
    kind, pipeline = KINDS[name]
    toy = kind(tmp_path, pipeline)
    rate = ["policy.lr=3e-3"] if name == "reward_model" else []  # its few rows are learnt by heart at 1e-2
    run = toy.run(*LORA, *rate, ranks=0)
    lines, role = measured(run), "critic" if name == "reward_model" else "policy"
    assert lines[4][toy.metric] < FALL * lines[1][toy.metric]
    assert lines[4]["val/loss"] < FALL * lines[0]["val/loss"]
    saved = SavedState.open(run.run_dir / "checkpoints" / "step-000004" / role)
    others = {key for key in saved.tensors if key.startswith(MODEL) and not key.startswith(MODEL + PREFIX)}
    assert others == ({HEAD} if name == "reward_model" else set())
    exported = load_file(run.run_dir / "checkpoints" / "step-000004" / "hf" / "model.safetensors")
    plain = load_file(toy.model / "model.safetensors")
    changed = {key for key in plain if key in exported and not exported[key].equal(plain[key])}
    assert changed == {key for key in plain if key.endswith("_proj.weight")}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepspeed", "megatron train.tp=2")]


NF4 = "fsdp2 policy.lora.base=nf4 critic.lora.base=nf4"


@pytest.mark.parametrize("train", ["fsdp2", pytest.param(NF4, marks=needs_nf4), *SLOW])
def test_ppo_has_a_critic_with_adapters_and_a_checkpoint_is_evaluated(train: str, tmp_path) -> None:
    toy = Toy(tmp_path, "qwen2")
    settings = ("policy.dtype=float32", "algorithm=ppo", "algorithm.kl_coef=0.01", "critic.lora.rank=4", "steps=2")
    run = toy.run(*LORA, *settings, *f"train={train}".split(), ranks=2)
    lines = run.metrics()
    assert lines[2]["train_infer/abs_diff/mean"] < 1e-4 and lines[2]["publish/probe_abs_diff"] < 3e-4
    assert lines[2]["actor/kl_loss"] > lines[1]["actor/kl_loss"] >= 0
    saved = SavedState.open(run.run_dir / "checkpoints" / "step-000002" / "critic")
    assert HEAD in saved.tensors and any(key.startswith(MODEL + PREFIX) for key in saved.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS)
def test_an_engine_answers_with_adapters_beside_frozen_weights(engine: str, tmp_path) -> None:
    settings = (f"engine={engine}", "engine.adapters=true", "policy.dtype=float32", "eval.every=0", "steps=3")
    toy = Toy(tmp_path, "qwen2", **VLLM_SIZES)
    run = toy.start(*LORA, *settings, ranks=2)
    assert run.wait(400) == 0, run.text()[-3000:]
    whole = (toy.model / "model.safetensors").stat().st_size
    for line in run.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < 1e-4 and line["actor/grad_norm"] > 0
        assert 0 < line["publish/bytes"] < whole / 2
