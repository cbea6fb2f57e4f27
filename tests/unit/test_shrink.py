"""`+shrink=cpu`: which settings it limits, and that each recipe of the package becomes one for two CPU ranks."""

import json
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.load import CONFIGS, experiment_doors, load
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.config.sections.models import BackendConfig, ServedModelConfig
from spmd_rl.config.shrink import ROWS
from spmd_rl.data import Prompts

OF_LANGUAGE = [p for p in sorted(CONFIGS.glob("experiment/*.yaml")) if experiment_doors(p)[0] != "reward_fl"]


def shrunk(experiment: str, *overrides: str, pipeline: str = ""):
    door = pipeline or experiment_doors(CONFIGS / "experiment" / f"{experiment}.yaml")[0]
    return load(door, PIPELINES[door], [f"+experiment={experiment}", "+shrink=cpu", *overrides])


@pytest.mark.parametrize("path", OF_LANGUAGE, ids=lambda path: path.stem)
def test_every_recipe_becomes_small(path: Path) -> None:
    for door in experiment_doors(path):
        cfg = shrunk(path.stem, pipeline=door)
        assert cfg.steps <= 2 and cfg.policy.model == str(Path(ServedModelConfig.model).expanduser())
        assert cfg.train.used_axes == {"tp": 1} and cfg.train.name == BackendConfig().name
        if hasattr(cfg, "rollout"):
            assert cfg.engine.name == "native" and cfg.engine.tp == 1 and cfg.rollout.max_new_tokens <= 24
            assert not any("url" in reward.args for reward in cfg.reward.domains.values())
            made = (
                [name for name in (cfg.data.train or "").split(",") if Path(name).is_file()]
                if hasattr(cfg, "data")
                else []
            )
            assert not path.stem.startswith("roll_rlvr") or len(made) == 5


def test_numbers_are_limits_and_the_command_line_is_kept() -> None:
    cfg = shrunk("roll_sokoban_8gpu")
    assert (cfg.rollout.prompts_per_step, cfg.rollout.answers_per_prompt, cfg.rollout.max_turns) == (4, 1, 3)
    assert (cfg.algorithm.advantage_clip, cfg.rollout.temperature, cfg.env.tags["frozen_lake"].share) == (10, 0.99, 0)
    assert {env.workers for env in cfg.env.tags.values()} == {1}
    cfg = shrunk("roll_sokoban_8gpu", "rollout.max_turns=5", "policy.model=/m", "engine=vllm", "train.cp=2")
    assert (cfg.rollout.max_turns, cfg.policy.model, cfg.engine.name, cfg.train.cp) == (5, "/m", "vllm", 2)
    assert shrunk("roll_rlvr_30b_a3b_32gpu", "engine=vllm").engine.tp == 1
    assert not (shrunk("roll_rlvr_7b_16gpu").algorithm.difficulty_mask or shrunk("demo").rollout.filter.zero_variance)
    assert shrunk("demo").rollout.max_new_tokens == 12 and shrunk("roll_rlvr_7b_16gpu").rollout.max_turns is None


def test_rewarders_that_need_a_server_and_sources_that_are_not_here(tmp_path: Path, monkeypatch) -> None:
    cfg = shrunk("roll_rlvr_7b_16gpu")
    targets = {domain: reward.target.rpartition(":")[2] for domain, reward in cfg.reward.domains.items()}
    assert targets["multi_subject"] == "GeneralReward" and targets["code"] == "CodeReward"
    prompts = Prompts.load(cfg.data)
    assert {p.domain for p in prompts.train} == {"math", "code", "multi_subject", "crossthink", "ifeval"}
    assert shrunk("rlvr_7b_8gpu").data.train == str(ROWS["gsm8k"])
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/deepmath_5000.jsonl").write_text(json.dumps({"question": "?", "answer": "1"}))
    assert shrunk("roll_rlvr_7b_16gpu").data.train.startswith("data/deepmath_5000.jsonl,/")
    assert shrunk("rlvr_7b_8gpu", "data.train=a/gsm8k.jsonl").data.train == str(ROWS["gsm8k"])


def test_reward_feedback_is_refused() -> None:
    with pytest.raises(UserError, match="^shrink=cpu: not supported by reward_fl, only for language models"):
        load("reward_fl", PIPELINES["reward_fl"], ["+shrink=cpu"])
