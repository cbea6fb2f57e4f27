"""What makes a run the same run: the name's hash, the default directory, `config.yaml`."""

import json
import os
import subprocess
import sys

import pytest

from spmd_rl.config.load import load
from spmd_rl.config.run_identity import identity_hash, saved_config, write_config
from spmd_rl.config.schema import EvaluateConfig, RlvrConfig


def rlvr(*overrides: str) -> RlvrConfig:
    return load("rlvr", RlvrConfig, ["+experiment=demo", *overrides])


@pytest.mark.parametrize(
    "override",
    [
        "steps=99",
        "run.dir=elsewhere",
        "run.name=x",
        "track.wandb=offline",
        "checkpoint.every=3",
        "eval.every=3",
        "eval.temperature=0.5",
        "journal.stall_seconds=5",
        "sidecar.bind=tcp://127.0.0.1:5555",
        "debug=true",
        "profile=true",
        "reward.reasoning_gym.workers=4",
        "reward.reasoning_gym.start_seconds=9",
    ],
)
def test_what_changes_no_sample_keeps_the_name(override):
    assert identity_hash(rlvr(override)) == identity_hash(rlvr())


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "policy.lr=1e-4",
        "policy.model=/other/model",
        "policy.dtype=float32",
        "train.updates_per_step=2",
        "rollout.temperature=0.9",
        "rollout.filter.zero_variance=false",
        "algorithm.kl_coef=0.1",
        "data.holdout=0.3",
        "data.args.max_digits=2",
        "reward.reasoning_gym.target=a:B",
        "reward.reasoning_gym.args.workers=2",
        "reward.math.target=a:B",
    ],
)
def test_what_changes_samples_or_gradients_changes_the_name(override):
    assert identity_hash(rlvr(override)) != identity_hash(rlvr())


def test_steps_count_where_the_learning_rate_decays():
    short, long = (identity_hash(rlvr("policy.schedule=cosine", f"steps={steps}")) for steps in (10, 20))
    assert short != long


def test_an_evaluation_has_a_name_of_its_own_for_each_way_to_answer():
    def named(*line: str) -> str:
        return load("evaluate", EvaluateConfig, list(line)).run.name

    lines = [(), ("eval.temperature=0.5",), ("eval.prompts=9",), ("policy.model=/a",), ("policy.model=/b",)]
    assert len({named(*line) for line in lines}) == len(lines) and "-evaluate-" in named()
    same = ("journal.stall_seconds=5", "eval.metrics=[ci95]", "eval.pass_score=0.5")
    assert {named(line) for line in same} == {named()}


def test_the_world_size_does_not_count(monkeypatch):
    before = identity_hash(rlvr())
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert identity_hash(rlvr()) == before


def test_default_name_and_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = rlvr("policy.model=/m/tiny")
    assert cfg.run.name == f"tiny-grpo-{identity_hash(cfg)}" and len(identity_hash(cfg)) == 8
    assert cfg.run.dir == f"{tmp_path}/runs/rlvr/{cfg.run.name}"
    for model, name in (("/runs/sft/checkpoints/step-000002/hf", "sft-step-000002"), ("/m/hf", "hf"), ("hf", "hf")):
        assert rlvr(f"policy.model={model}").run.name.startswith(f"{name}-grpo-")
    assert rlvr("run.name=x").run.dir == f"{tmp_path}/runs/rlvr/x"
    assert rlvr("run.dir=here").run.dir == f"{tmp_path}/here"
    monkeypatch.setenv("HOME", "/home/me")
    assert rlvr("run.dir=~/r").run.dir == "/home/me/r"
    assert os.listdir(tmp_path) == []


def test_the_digest_is_the_same_in_every_process():
    code = (
        "from spmd_rl.config.load import load\nfrom spmd_rl.config.run_identity import identity_hash\n"
        "from spmd_rl.config.schema import RlvrConfig\n"
        "print(identity_hash(load('rlvr', RlvrConfig, ['+experiment=demo'])))"
    )
    salts = [{**os.environ, "PYTHONHASHSEED": salt} for salt in ("1", "2")]
    told = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for env in salts]
    assert [one.stdout.strip() for one in told] == [identity_hash(rlvr())] * 2


def test_config_yaml_says_settings_versions_and_revision(tmp_path):
    cfg = rlvr(f"run.dir={tmp_path}/run", "reward.math.target=a:B")
    write_config(cfg, cfg.run.dir, "rlvr")
    assert os.listdir(cfg.run.dir) == ["config.yaml"]
    saved = saved_config(cfg.run.dir)
    assert saved["reward"]["math"]["target"] == "a:B"
    assert saved["policy"]["lr"] == cfg.policy.lr
    about = saved["about"]
    assert about["pipeline"] == "rlvr"
    assert about["versions"]["torch"].startswith("2.") and "hydra-core" in about["versions"]
    assert about["git_revision"] is None or len(about["git_revision"].removesuffix("-dirty")) == 40
    json.dumps(saved)  # plain values only


def test_config_yaml_can_be_given_back(tmp_path):
    cfg = rlvr("rollout.temperature=0.7", f"run.dir={tmp_path}", "policy.lr=3e-6", "run.name=first")
    write_config(cfg, tmp_path, "rlvr")
    again = load("rlvr", RlvrConfig, [], config_dir=str(tmp_path), config_name="config")
    assert again == cfg


def test_settings_that_a_resume_changes_are_kept_with_their_last_step(tmp_path):
    def start(lr: float, temperature: float = 1.0) -> list:
        cfg = load("rlvr", RlvrConfig, [f"policy.lr={lr}", f"rollout.temperature={temperature}"])
        write_config(cfg, tmp_path, "rlvr")
        return saved_config(tmp_path)["about"].get("until", [])

    def saved(step: int) -> None:
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / "latest").write_text(f"step-{step:06d}\n")

    assert start(1e-3) == start(3e-5) == []  # nothing is trained yet
    saved(10)
    assert start(3e-5) == []
    first = {"step": 10, "settings": {"policy.lr": 3e-5}}
    assert start(1e-4) == start(1e-5) == [first]  # the start between them trained nothing
    assert start(3e-5) == []
    assert start(1e-5) == [first]
    saved(20)
    assert start(1e-6, 0.5) == [first, {"step": 20, "settings": {"policy.lr": 1e-5, "rollout.temperature": 1.0}}]


def test_a_directory_that_is_given_names_the_run(tmp_path):
    assert rlvr(f"run.dir={tmp_path}/sums").run.name == "sums"
    assert rlvr(f"run.dir={tmp_path}/sums", "run.name=mine").run.name == "mine"
    assert rlvr().run.name.startswith("smollm2-135m-instruct-")
