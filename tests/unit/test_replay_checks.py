"""What a run that replays others' rollouts must have in common with the one that generated them."""

import json
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.apply import apply
from spmd_rl.config.load import load
from spmd_rl.config.replay import about_samples, check_replay
from spmd_rl.config.schema import AgenticConfig, RlvrConfig
from tests.models import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, as far as the checks look at it."""
    run = tmp_path_factory.mktemp("run")
    tiny("llama", run / "model")
    tiny("llama", other := run / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("<|im_end|>", "<|other|>"))
    cfg = loaded(run)
    (run / "rollouts").mkdir()
    (run / "rollouts" / "about.json").write_text(json.dumps(about_samples(cfg.rollout, cfg.algorithm, cfg.policy)))
    for step in (1, 2):
        (run / "rollouts" / f"step-{step:06d}.json").touch()
    return run


def loaded(run: Path, *settings: str) -> RlvrConfig:
    given = [f"policy.model={run}/model", "steps=2", "rollout.top_k=20", "rollout.answers_per_prompt=4"]
    return load("rlvr", RlvrConfig, [*given, f"rollout.replay={run}", *settings])


def test_other_settings_of_training_go(run: Path) -> None:
    cfg = loaded(run, "policy.lr=1e-3", "algorithm=dapo", "rollout.prompts_per_step=3", "steps=1", "eval.every=3")
    assert apply((check_replay,), cfg) == [None] and cfg.eval.every == 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["steps=3"], "rollout.replay: {run} ends with step 2, and steps=3; set steps=2"),
        (["rollout.answers_per_prompt=6"], "rollout.replay: rollout.answers_per_prompt is 4 in {run} and 6 here"),
        (["rollout.top_k=0"], "rollout.replay: rollout.top_k is 20 in {run} and 0 here"),
        (
            ["algorithm=remax"],
            "rollout.replay: the greedy answer of algorithm.advantage is False in {run} and True here",
        ),
        (["policy.model={run}/other"], "rollout.replay: the vocabulary of policy.model is "),
        (
            ["placement.mode=split"],
            "placement.mode: split is not supported with rollout.replay, which generates nothing",
        ),
        (["rollout.replay=/nowhere"], "rollout.replay: /nowhere is not a run with saved rollouts, "),
    ],
)
def test_another_dump_is_one_line(run: Path, settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match="^" + line.format(run=run)):
        apply((check_replay,), loaded(run, *[one.format(run=run) for one in settings]))


@pytest.mark.parametrize(("steps", "line"), [(1, "warmup.steps: must be 0 with "), (0, ".* env is False in")])
def test_agents_replay_agents_alone(run: Path, steps: int, line: str) -> None:
    given = [f"policy.model={run}/model", "steps=2", "rollout.top_k=20", "rollout.answers_per_prompt=4"]
    cfg = load("agentic", AgenticConfig, [*given, f"rollout.replay={run}", f"warmup.steps={steps}"])
    with pytest.raises(UserError, match=line):
        apply((check_replay,), cfg)
