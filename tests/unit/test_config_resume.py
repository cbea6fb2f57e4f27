"""What a command may change of the run in its directory, and the way out where it may not."""

import hashlib
import json

import pytest
import yaml

from spmd_rl.base.errors import UserError
from spmd_rl.config.algorithm_targets import sources
from spmd_rl.config.keys import to_dict
from spmd_rl.config.load import load
from spmd_rl.config.resume import continue_run, holds_run
from spmd_rl.config.run_identity import identity, identity_hash, write_config
from spmd_rl.config.schema import RlvrConfig


def rlvr(*overrides: str) -> RlvrConfig:
    return load("rlvr", RlvrConfig, ["+experiment=demo", "policy.dtype=float32", *overrides])


@pytest.fixture
def folder(tmp_path):
    """The directory of a demo that has made two steps and a checkpoint."""
    write_config(rlvr(f"run.dir={tmp_path}"), tmp_path, "rlvr")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step-000002\n")
    return tmp_path


def refusal(folder, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        continue_run(rlvr(f"run.dir={folder}", *overrides), "rlvr")
    return str(caught.value)


def test_the_same_command_has_no_notice(folder):
    for same in (
        [],
        ["run.name=other"],
        ["track.wandb=offline", "checkpoint.every=5"],
        ["reward.reasoning_gym.workers=4"],
    ):
        assert continue_run(rlvr(f"run.dir={folder}", *same), "rlvr") == []
    assert continue_run(rlvr(f"run.dir={folder}/other", "rollout.temperature=0.5"), "rlvr") == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policy.lr=1e-6", "policy.lr: 2e-05 before, 1e-06 from here on"),
        ("critic.lr=1e-6", "critic.lr: 1e-05 before, 1e-06 from here on"),
        ("policy.schedule=cosine", "policy.schedule: 'constant' before, 'cosine' from here on"),
        ("policy.warmup_steps=3", "policy.warmup_steps: 0 before, 3 from here on"),
        ("policy.betas=[0.9,0.95]", "policy.betas: [0.9, 0.999] before, [0.9, 0.95] from here on"),
        ("steps=20", "steps: 8 before, 20 from here on"),
        ("eval.every=2", "eval.every: 4 before, 2 from here on"),
        ("eval.temperature=0.5", "eval.temperature: None before, 0.5 from here on"),
        ("rollout.max_new_tokens=24", "rollout.max_new_tokens: 12 before, 24 from here on"),
        ("train.tokens_per_microbatch=99", "train.tokens_per_microbatch: 4096 before, 99 from here on"),
        ("engine=vllm", "engine.name: 'native' before, 'vllm' from here on"),
        ("reward.reasoning_gym.timeout=99", "reward.reasoning_gym.timeout: 50.0 before, 99.0 from here on"),
    ],
)
def test_what_people_tune_may_change_with_a_notice(folder, override, line):
    assert continue_run(rlvr(f"run.dir={folder}", override), "rlvr") == [line]


@pytest.mark.parametrize(
    ("override", "words", "way_out"),
    [
        ("rollout.temperature=0.5", "rollout.temperature: {dir} was started with 1.0, not 0.5; keep that, ", "resume"),
        ("seed=1", "seed: {dir} was started with 0, not 1; ", "resume"),
        ("policy.dtype=bfloat16", "policy.dtype: {dir} was started with 'float32', not 'bfloat16'; ", "resume"),
        ("algorithm=dapo", "algorithm.name: {dir} was started with 'grpo', not 'dapo'; ", "resume"),
        ("reward.math.target=a:B", "reward.math.target: {dir} was started with none, not 'a:B'; ", "resume"),
        (
            "reward.reasoning_gym.args.lr=1",
            "reward.reasoning_gym.args.lr: {dir} was started with none, not 1; ",
            "resume",
        ),
        ("data.args.max_digits=3", "data.args.max_digits: {dir} was started with 1, not 3; ", "weights"),
        ("policy.model=/m", "policy.model: {dir} was started with ", "weights"),
    ],
)
def test_another_experiment_is_refused_with_the_way_to_begin_it(folder, override, words, way_out):
    line = refusal(folder, override)
    assert line.startswith(words.format(dir=folder))
    ways = {"resume": "checkpoint.resume={}", "weights": "policy.model={}/hf"}
    assert line.endswith(f"{ways[way_out].format(folder / 'checkpoints' / 'step-000002')} run.dir=NEW")


def test_without_a_checkpoint_there_is_nothing_to_begin_from(folder):
    (folder / "checkpoints" / "latest").unlink()
    assert refusal(folder, "seed=1").endswith("not 1; keep that, or choose another run.dir")


def test_what_crashed_before_its_first_step_blocks_nothing(folder):
    (folder / "checkpoints" / "latest").unlink()
    for lines in ("", '{"step": 0}\n'):
        (folder / "metrics.jsonl").write_text(lines)
        assert not holds_run(folder)
        assert continue_run(rlvr(f"run.dir={folder}", "rollout.temperature=0.5"), "rlvr") == []
    (folder / "metrics.jsonl").write_text("somebody else's")
    assert holds_run(folder)


def test_auto_is_the_dtype_that_the_run_began_with(folder):
    cfg = rlvr(f"run.dir={folder}", "policy.dtype=auto")
    assert continue_run(cfg, "rlvr") == [f"policy.dtype=auto: float32, as in the steps that {folder} holds"]
    assert cfg.policy.dtype == "float32"
    cfg = rlvr(f"run.dir={folder}/other", "policy.dtype=auto")
    assert continue_run(cfg, "rlvr") == [] and cfg.policy.dtype == "auto"


def test_a_run_older_than_a_setting_is_compared_with_its_default(folder):
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    del saved["rollout"]["min_answers"]
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert continue_run(rlvr(f"run.dir={folder}"), "rlvr") == []
    assert refusal(folder, "rollout.min_answers=3").startswith("rollout.min_answers: ")


def test_a_run_from_before_a_setting_was_renamed_goes_on(folder):
    path = folder / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    assert saved["teacher"].pop("only") is True
    for value in (True, False):
        path.write_text(yaml.safe_dump(saved | {"teacher": saved["teacher"] | {"alone": value}}))
        if value:
            assert continue_run(rlvr(f"run.dir={folder}"), "rlvr") == []
        else:
            assert refusal(folder).startswith(f"teacher.only: {folder} was started with ")


def test_a_renamed_setting_keeps_the_names_of_runs_and_is_answered() -> None:
    cfg = rlvr()
    settings = identity(to_dict(cfg))
    settings["teacher.alone"] = settings.pop("teacher.only")
    text = json.dumps(settings | sources(cfg), sort_keys=True)
    assert identity_hash(cfg) == hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    with pytest.raises(UserError, match="^teacher.alone: unknown key; it is now teacher.only$"):
        rlvr("teacher.alone=false")


def test_another_pipeline_and_a_broken_file_are_refused(folder):
    write_config(rlvr(f"run.dir={folder}"), folder, "sft")
    assert "holds a run of sft" in refusal(folder)
    (folder / "config.yaml").write_text("a: [")
    assert "config.yaml cannot be read" in refusal(folder)
