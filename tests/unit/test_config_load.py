"""Composition: every shipped YAML, every kind of override, and the one line that each mistake gets."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from spmd_rl.base.errors import UserError
from spmd_rl.config.keys import flatten, leaves, to_dict, type_name
from spmd_rl.config.load import CONFIGS, build, experiment_doors, load
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.config.schema import AgenticConfig, RlvrConfig, RolloutConfig


def rlvr(*overrides: str, **kwargs: str) -> RlvrConfig:
    return load("rlvr", RlvrConfig, overrides, **kwargs)


def refusal(*overrides: str, **kwargs: str) -> str:
    with pytest.raises(UserError) as caught:
        rlvr(*overrides, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    return line


OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONFIGS.glob("*/*.yaml"))]


def test_there_are_shipped_files_to_test():
    assert {"train", "engine", "algorithm", "data", "experiment"} <= {group for group, _ in OPTIONS}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(PIPELINES)


DOORS = {("algorithm", name): ("agentic", "evaluate") for name in ("gigpo", "starpo", "step_reinforce", "turn_gae")}
DOORS |= {("data", option): ("rlvr", "evaluate") for group, option in OPTIONS if group == "data"}
DOORS |= {("feedback", option): ("reward_fl",) for group, option in OPTIONS if group == "feedback"}
DOORS |= {("train", name): set(PIPELINES) - {"reward_fl"} for name in ("deepspeed", "megatron")}
DOORS |= {("shrink", "cpu"): set(PIPELINES) - {"reward_fl"}}
DOORS |= {("experiment", path.stem): experiment_doors(path) for path in CONFIGS.glob("experiment/*.yaml")}
"""Options that compose under some doors only; the others refuse them by name."""


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_shipped_yaml_composes_under_its_door(pipeline, group, option):
    takes_all = group == "experiment"
    with_group = [n for n, schema in PIPELINES.items() if takes_all or schema.borrows or hasattr(schema(), group)]
    if pipeline not in DOORS.get((group, option), with_group):
        with pytest.raises(UserError, match=option if group != "data" else "data"):
            load(pipeline, PIPELINES[pipeline], [f"{group}={option}"])
        return
    cfg = load(pipeline, PIPELINES[pipeline], [f"+{group}={option}" if group == "experiment" else f"{group}={option}"])
    assert type(cfg) is PIPELINES[pipeline]
    scored = {"rlvr"} if option != "reward_fl_sd3_8gpu" else {"reward_fl"}
    rewarded = group in ("data", "experiment") and bool(scored.intersection(DOORS[group, option]))
    has_rewards = hasattr(cfg, "reward") and bool(cfg.reward.domains)
    assert has_rewards == (pipeline in ("rlvr", "reward_fl", "evaluate") and rewarded)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_yaml_is_sparse(path):
    """A file that repeats a default hides the day the default changes; only what an option is about may stand there."""
    text = path.read_text()
    values = yaml.safe_load(text)
    values.pop("defaults", None)
    prefix = "" if "@package _global_" in text or path.parent == CONFIGS else f"{path.parent.name}."
    defaults = dict(flatten(to_dict(RlvrConfig()) | to_dict(AgenticConfig())))
    repeated = [key for key, value in flatten(values, prefix) if key in defaults and value == defaults[key]]
    assert set(repeated) <= {"train.name", "engine.name", "algorithm.name", "data.train"}


def test_defaults_are_the_embedded_run_on_nobodys_data():
    cfg = rlvr()
    assert (cfg.train.name, cfg.engine.name, cfg.algorithm.name) == ("fsdp2", "native", "grpo")
    assert (cfg.policy.dtype, cfg.policy.lr) == ("auto", 1e-6)
    assert (cfg.rollout.claim, cfg.rollout.accept) == ("store", "in_order")
    assert (cfg.rollout.over_sample, cfg.rollout.filter.zero_variance) == (0, False)
    assert (cfg.data.train, cfg.data.format, cfg.reward.domains) == (None, "{question}", {})


def test_the_demo_is_an_experiment_whose_recipe_may_be_another():
    cfg = rlvr("+experiment=demo")
    assert (cfg.steps, cfg.policy.lr, cfg.rollout.max_new_tokens, cfg.rollout.over_sample) == (8, 2e-5, 12, 2)
    assert (
        cfg.rollout.filter.zero_variance and not rlvr("+experiment=demo", "algorithm=ppo").rollout.filter.zero_variance
    )
    assert cfg.data.train == "reasoning_gym:basic_arithmetic"
    assert cfg.reward.domains["reasoning_gym"].target == "rewards.reasoning_gym:ReasoningGymReward"


def test_overrides_reach_typed_fields():
    cfg = rlvr("rollout.temperature=1", "policy.lr=1e-3", "run.name=x", "rollout.filter.min_mean_score=0.2")
    assert cfg.rollout.temperature == 1.0 and isinstance(cfg.rollout.temperature, float)
    assert cfg.policy.lr == 1e-3
    assert cfg.rollout.filter.min_mean_score == 0.2


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_new_domain_with_and_without_plus(plus):
    cfg = rlvr(
        "data=one_digit_sums",
        f"{plus}reward.math.target=mod:Class",
        f"{plus}reward.math.args.strict=true",
        "reward.error_budget=0.5",
    )
    assert cfg.reward.domains["math"].target == "mod:Class"
    assert cfg.reward.domains["math"].args == {"strict": True}
    assert cfg.reward.domains["math"].timeout == 50.0
    assert cfg.reward.error_budget == 0.5
    assert set(cfg.reward.domains) == {"math", "reasoning_gym"}


@pytest.mark.parametrize("line", ["experiment=two_digit_sums", "+experiment=two_digit_sums"])
def test_experiment_with_and_without_plus(line):
    cfg = rlvr(line)
    assert cfg.data.args["min_digits"] == 2
    assert rlvr(line, "steps=3").steps == 3


def test_data_of_a_kind_leaves_no_other_domain():
    cfg = rlvr("+experiment=demo", "data=jsonl_math", "data.train=mine.jsonl")
    assert list(cfg.reward.domains) == ["math"]
    assert cfg.data.train == "mine.jsonl"
    assert cfg.data.args == {}


def test_values_that_hydra_refuses_are_plain_strings(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = rlvr("data.train=a.jsonl,~/b.jsonl", "policy.model=~/models/x", "data.format=Solve: {question}")
    assert cfg.data.train == "a.jsonl,/home/me/b.jsonl"
    assert cfg.policy.model == "/home/me/models/x"
    assert cfg.data.format == "Solve: {question}"


def test_interpolation_between_sections_and_domains():
    cfg = rlvr(
        "eval.temperature=${rollout.temperature}", "reward.math={target: a:B, timeout: 3}", "rollout.temperature=2"
    )
    assert cfg.eval.temperature == 2.0
    cfg = rlvr("data=one_digit_sums", "reward.math.target=${reward.reasoning_gym.target}")
    assert cfg.reward.domains["math"].target == cfg.reward.domains["reasoning_gym"].target


def test_plain_is_the_inverse_of_build():
    cfg = rlvr("reward.math.target=a:B", "reward.math.args.x=[1,2]", "policy.betas=[0.8,0.9]", "run.name=x")
    tree = to_dict(cfg)
    assert tree["reward"]["math"]["target"] == "a:B" and "domains" not in tree["reward"]
    assert build(RlvrConfig, OmegaConf.create(tree)) == cfg


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean rollout.temperature?"),
        ("+rollout.temprature=1", "rollout.temprature: unknown key; did you mean rollout.temperature?"),
        ("rollouts.temperature=1", "rollouts.temperature: unknown key; did you mean rollout.temperature?"),
        ("rollout.filter.zero_varianze=1", "rollout.filter.zero_varianze: unknown key; did you mean rollout.filter."),
        ("stepps=1", "stepps: unknown key; did you mean steps?"),
        ("rollout.top_n=50", "rollout.top_n: unknown key; did you mean rollout.top_p?"),
        ("reward.math.targett=a:B", "reward.math.targett: unknown key; did you mean reward.math.target?"),
        ("reward.error_budgit=0.1", "reward.error_budgit: unknown key; did you mean reward.error_budget?"),
        ("reward.domains.math.target=a:B", "reward.domains.math.target: unknown key; did you mean reward."),
        ("rollout=3", "rollout: is a section, not a value; set rollout.<key>=value"),
        ("rollout.filter=null", "rollout.filter: is a section"),
        ("steps=1.5", "steps: expected int, got 1.5"),
        ("rollout.temperature=hot", "rollout.temperature: expected float, got 'hot'"),
        ("rollout.temperature=null", "rollout.temperature: expected float, got null"),
        ("policy.lr=1e-5,1e-4", "policy.lr: expected float, got '1e-5,1e-4'"),
        ("policy.lr.x=1", "policy.lr: expected float, got {'x': 1}"),
        ("rollout.stop='='", "rollout.stop: expected list of str, got '='; set rollout.stop='[\"=\"]'"),
        (
            "rollout.stop=</answer>",
            "rollout.stop: expected list of str, got '</answer>'; set rollout.stop='[\"</answer>\"]'",
        ),
        ("policy.betas=0.9", "policy.betas: expected list of float, got 0.9; set policy.betas='[0.9]'"),
        ("policy.betas=[0.9,x]", "policy.betas: expected list of float, got [0.9, 'x']"),
        ("debug=maybe", "debug: expected bool, got 'maybe'"),
        ("data.args=3", "data.args: expected mapping, got 3"),
        ("reward.reasoning_gym.timeout=soon", "reward.reasoning_gym.timeout: expected float, got 'soon'"),
        ("policy.lr=${nope}", "policy.lr: Interpolation key 'nope' not found"),
        ("reward.math.timeout=3", "reward.math.target: must be given"),
        ("train=horovod", "train: unknown option 'horovod'; known: deepspeed, fsdp2, megatron"),
        ("train=null", "train: unknown option None; known: deepspeed, fsdp2, megatron"),
        ("algorithm=grop", "algorithm: unknown option 'grop'; did you mean algorithm=grpo? known: cispo"),
        ("+experiment=nope", "experiment: unknown option 'nope'; known: demo, "),
        ("just_a_word", "just_a_word: not an override; write key=value"),
        ("hydra.run.dir=x", "hydra.run.dir: Hydra's own settings have no effect here"),
    ],
)
def test_one_line_for_each_mistake_of_composition(override, line):
    assert refusal(override).startswith(line)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("rollout.temperature=-1", "rollout.temperature: must be greater than 0, not -1.0"),
        ("rollout.temperature=0", "rollout.temperature: must be greater than 0, not 0.0"),
        ("rollout.temperature=inf", "rollout.temperature: must be greater than 0, not inf"),
        ("policy.lr=-1e-5", "policy.lr: must be at least 0, not -1e-05"),
        ("policy.lr=nan", "policy.lr: must be at least 0, not nan"),
        ("policy.dtype=fp8", "policy.dtype: unknown name 'fp8'; known: auto, bfloat16, float32, float16"),
        ("reference.dtype=half", "reference.dtype: unknown name 'half'; known: bfloat16, float32, float16"),
        ("policy.lora.rank=-1", "policy.lora.rank: must be at least 0, not -1"),
        ("policy.lora.dropout=1", "policy.lora.dropout: must be in [0, 1), not 1.0"),
        ("policy.lora.base=int4", "policy.lora.base: unknown name 'int4'; known: nf4"),
        ("policy.lora.targets=[]", "policy.lora.targets: must name at least one layer"),
        (
            "engine.quantization=nf4",
            "engine.quantization: unknown name 'nf4'; known: fp8, int8, int4, w8a8_fp8, w8a8_int8",
        ),
        ("policy.schedule=step", "policy.schedule: unknown name 'step'; known: constant, linear, cosine"),
        ("policy.betas=[0.9]", "policy.betas: must be two numbers in [0, 1), not [0.9]"),
        ("policy.max_grad_norm=0", "policy.max_grad_norm: must be greater than 0"),
        ("rollout.claim=steal", "rollout.claim: unknown name 'steal'; known: store, static"),
        ("rollout.accept=soon", "rollout.accept: unknown name 'soon'; known: in_order, first_finished"),
        ("rollout.min_answers=9", "rollout.min_answers: 9 is more than answers_per_prompt 8"),
        ("rollout.max_prompts_per_step=4", "rollout.max_prompts_per_step: must be at least 8, not 4"),
        ("rollout.filter={min_mean_score: 0.9, max_mean_score: 0.1}", "rollout.filter.min_mean_score: 0.9 is above"),
        ("track.device.flops=0", "track.device.flops: must be greater than 0, not 0"),
        ("data.holdout=1.1", "data.holdout: must be between 0 and 1, not 1.1"),
        ("data.holdout=-0.1", "data.holdout: must be between 0 and 1, not -0.1"),
        ("steps=0", "steps: must be at least 1, not 0; python -m spmd_rl.evaluate evaluates and trains nothing"),
        ("eval.metrics=[pass@2]", "eval.metrics: pass@2 needs as many answers, but answers is 1"),
        ("eval.metrics=[pass]", "eval.metrics: 'pass' is unknown; known: ci95, pass@K, maj@K"),
        ("data.format=Hi", "data.format: must contain {question}, is 'Hi'"),
        ("rollout.top_p=1.1", "rollout.top_p: must be between 0 and 1, not 1.1"),
        ("rollout.answers_per_claim=9", "rollout.answers_per_claim: 9 is more than answers_per_prompt"),
        (
            ["rollout.claim=static", "rollout.accept=first_finished"],
            "rollout.claim: static needs accept=in_order",
        ),
        (
            ["rollout.partial_rollout=true", "rollout.tail=defer"],
            "rollout.partial_rollout: not supported with tail",
        ),
        ("engine.kv_tokens=100", "engine.kv_tokens: 100 cannot hold one request"),
        ("engine.name=vlm", "engine.name: unknown name 'vlm'; known: native, vllm"),
        ("algorithm.loss_agg=mean", "algorithm.loss_agg: unknown name 'mean'; known: token-mean, "),
        ("algorithm.clip_low=1.5", "algorithm.clip_low: must be between 0 and 1, not 1.5"),
        ("reward.error_budget=2", "reward.error_budget: must be between 0 and 1, not 2.0"),
        ("reward.reasoning_gym.target=nocolon", "reward.reasoning_gym.target: must be module:Class, not 'nocolon'"),
        (["reward.math.target=a:B", "reward.math.workers=0"], "reward.math.workers: must be at least 1, not 0"),
        ("track.wandb=on", "track.wandb: unknown name 'on'; known: off, offline, online"),
        ("algorithm.advantage=gea", "algorithm.advantage: unknown name 'gea'; known: grpo, dr_grpo, rloo"),
        ("algorithm.loss=reinforce", "algorithm.loss: unknown name 'reinforce'; known: ppo_clip"),
        ("algorithm.loss_agg=mean", "algorithm.loss_agg: unknown name 'mean'; known: token-mean, "),
        ("algorithm.kl_estimator=k4", "algorithm.kl_estimator: unknown name 'k4'; known: k1, k2, k3"),
        (["algorithm=pass_at_k", "algorithm.norm_std_type=batch"], "algorithm.norm_mean_type: pass_at_k counts right"),
        ("sidecar.bind=udp://x", "sidecar.bind: must be ipc or tcp://ADDRESS:PORT"),
        ("journal.stall_seconds=0", "journal.stall_seconds: must be greater than 0"),
        ("checkpoint.keep=0", "checkpoint.keep: must be at least 1, not 0"),
        ("steps=-1", "steps: must be at least 1, not -1"),
    ],
)
def test_one_line_for_each_value_out_of_range(overrides, line):
    assert refusal(*([overrides] if isinstance(overrides, str) else overrides)).startswith(line)


def test_what_yaml_reads_as_a_truth_value_is_the_name_that_was_meant(tmp_path: Path):
    own = "defaults: [rlvr, _self_]\ntrack: {wandb: off, swanlab: off}\nalgorithm: {correction: {level: off}}\n"
    (tmp_path / "own.yaml").write_text(own)
    cfg = rlvr(config_dir=str(tmp_path), config_name="own")
    assert (cfg.track.wandb, cfg.track.swanlab, cfg.algorithm.correction.level) == ("off", "off", "off")
    assert rlvr("track.wandb=off").track.wandb == "off"
    assert refusal("rollout.claim=off").startswith("rollout.claim: unknown name ")


def test_a_section_built_by_hand_checks_itself():
    with pytest.raises(UserError, match=r"^temperature: must be greater than 0"):
        RolloutConfig(temperature=-1)


def test_a_directory_of_the_users_own(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 9\n")
    (tmp_path / "own.yaml").write_text("defaults: [rlvr, _self_]\nsteps: 7\n")
    assert rlvr("+experiment=mine", config_dir=str(tmp_path)).seed == 9
    assert rlvr(config_dir=str(tmp_path), config_name="own").steps == 7
    assert rlvr("+experiment=mine", config_dir=str(tmp_path), config_name="own").seed == 9
    assert refusal(config_dir="/no/such") == "--config-dir: no directory /no/such"
    assert refusal(config_name="nope").startswith("--config-name: no nope.yaml")


def test_broken_yaml_names_file_and_line(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("steps: 1\n  seed: 3\n")
    assert refusal(config_dir=str(tmp_path), config_name="bad").startswith(f"{tmp_path}/bad.yaml:2: ")


def test_every_field_of_the_schema_has_a_type_that_can_be_named():
    keys = [leaf.key for leaf in leaves(RlvrConfig)]
    assert "rollout.filter.zero_variance" in keys and "reward.<domain>.target" in keys
    assert len(keys) == len(set(keys))
    assert all(type_name(leaf.type) for leaf in leaves(RlvrConfig))


def test_settings_need_no_torch_and_start_fast():
    code = (
        "import sys, time; t = time.process_time()\n"
        "from spmd_rl.config.load import load\nfrom spmd_rl.config.schema import RlvrConfig\n"
        "load('rlvr', RlvrConfig); print(time.process_time() - t); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5  # about 0.3 s of a processor
