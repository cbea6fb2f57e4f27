"""The memory planner on tiny models: every axis, the count of what is held, what it says, and what it proposes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.config.backends import backend
from spmd_rl.config.checks import check_plan
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.load import CONFIGS, experiment_doors, load
from spmd_rl.config.packages import installed
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed.dtype import choose_dtype
from spmd_rl.model.build import shape_on_meta
from spmd_rl.model.size import ModelSize
from spmd_rl.tools.plan import largest_cache, pictures, show
from spmd_rl.tools.plan.engine import NOTHING, dtype_of
from spmd_rl.tools.plan.memory_tracker import MemoryTracker
from spmd_rl.tools.plan.rank import Trace, trace
from spmd_rl.tools.plan.rank import planned as settings_of_plan
from spmd_rl.tools.plan.table import TableRow, rows
from tests.engines import needs_nf4
from tests.models import EXPERTS, tiny
from tests.toy_vlm import VLM_KINDS, toy_vlm

LAYOUTS = [
    ("llama", 1, []),
    ("llama", 4, ["tp=2"]),
    ("llama", 8, ["pp=2", "tp=2", "cp=2"]),
    ("qwen3_moe", 4, ["ep=2"]),
]
SLOW = [
    ("llama", 4, []),
    ("llama", 4, ["cp=2"]),
    ("llama", 4, ["dp_replicate=2"]),
    ("llama", 4, ["pp=2"]),
    ("deep llama", 4, ["pp=2", "vpp=2"]),
    ("deepseek_v3", 8, ["ep=4", "cp=2"]),
]
SHORT = [
    "rollout.max_prompt_tokens=32", "rollout.max_new_tokens=32", "rollout.prompts_per_step=16",
    "rollout.answers_per_prompt=4", "train.tokens_per_microbatch=256", "policy.dtype=bfloat16",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, a directory with nothing but a `config.json`."""
    found = {}
    for kind in {kind for kind, _, _ in (*LAYOUTS, *SLOW)}:
        sizes = {"num_hidden_layers": 4} if kind.startswith("deep ") else EXPERTS.get(kind, {})
        whole = tiny(kind.removeprefix("deep "), tmp_path_factory.mktemp(kind), **sizes)
        found[kind] = tmp_path_factory.mktemp(f"{kind}-shape")
        (found[kind] / "config.json").write_text((whole / "config.json").read_text())
    return found


def planned(path: Path, size: int, train: list[str] = (), rank: int = 0, more: list[str] = ()) -> Trace:
    overrides = [f"policy.model={path}", *SHORT, *(f"train.{line}" for line in train), *more]
    return trace(load("rlvr", RlvrConfig, overrides), rank, size)


@pytest.mark.parametrize(
    ("kind", "size", "train"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: str(value),
)
def test_all_ranks_together_hold_the_model_and_its_moments_once(kind, size, train, models):
    found = [planned(models[kind], size, train, rank) for rank in sorted({0, size - 1})]
    whole = found[0].size.parameters
    copies = 2 if "dp_replicate=2" in train else 1
    for one in found:
        held, update = one.held, one.phases["update"][0]
        assert held["policy optimizer"] == pytest.approx(2 * held["policy weights"], rel=0.05), "shards are padded"
        if copies == 1:  # else each copy adds up its own until the last micro-batch
            assert update.peak.by_tag["policy gradients"] == pytest.approx(held["policy weights"], rel=0.05)
        assert update.peak.total > held["policy weights"] + held["policy optimizer"]
        if "pp=2" not in train:  # stages hold different layers
            own = held["policy weights"] / 4 * size / copies
            assert own == pytest.approx(whole, rel=0.06), "norms of all heads lie whole on each rank of tp"
    if "pp=2" in train:
        mean = sum(one.held["policy weights"] for one in found) / len(found)
        assert mean / 4 * size == pytest.approx(whole, rel=0.06)
    kinds = set(found[0].phases["update"][0].travelled)
    exchanged = any(line.startswith(("ep", "cp")) for line in train) and "tp=2" not in train
    assert ("all-to-all" in kinds) == exchanged, "with one key-value head a rank, keys are gathered"
    assert ("send" in kinds) == ("pp=2" in train)
    assert bool(kinds) == (size > 1)


def test_what_travels_grows_with_the_micro_batches_of_the_step(models):
    few = planned(models["llama"], 4, more=["rollout.prompts_per_step=16"])
    many = planned(models["llama"], 4, more=["rollout.prompts_per_step=64"])
    assert (few.microbatches, many.microbatches) == (4, 16)
    sent = [one.phases["update"][0].travelled["reduce-scatter"] for one in (few, many)]
    assert sent[1] == pytest.approx(4 * sent[0], rel=0.01)
    assert many.phases["update"][0].peak.total == pytest.approx(few.phases["update"][0].peak.total, rel=0.01)


@pytest.mark.slow
def test_checkpointing_and_shorter_micro_batches_need_less(models):
    longer = ["rollout.max_new_tokens=2000", "train.tokens_per_microbatch=8192", "engine.kv_tokens=4096"]
    peaks = [
        planned(models["llama"], 2, [f"activation_checkpointing={mode}"], more=longer).phases["update"][0].peak
        for mode in ("none", "selective", "full")
    ]
    assert peaks[0].total > peaks[1].total > peaks[2].total
    assert all(peak.by_tag["activations"] for peak in peaks)


@pytest.mark.slow
def test_roles_beside_the_policy_are_counted(models):
    found = planned(models["llama"], 2, more=["algorithm=ppo", "algorithm.kl_coef=0.1"])
    assert {"policy weights", "critic weights", "critic optimizer", "reference weights"} <= set(found.held)
    assert found.held["reference weights"] == pytest.approx(found.held["policy weights"] / 2, rel=0.01), "bfloat16"
    assert {part.role for part in found.phases["prepare"]} == {"reference", "critic"}
    assert {part.role for part in found.phases["update"]} == {"policy", "critic"}
    asleep = planned(models["llama"], 2, ["offload=true"], more=["algorithm=ppo", "algorithm.kl_coef=0.1"])
    for phase in ("publish", "prepare", "update"):
        assert asleep.phases[phase][0].peak.total < found.phases[phase][0].peak.total


def test_a_plan_makes_up_answers_that_parse_as_nothing(models):
    more = ["rollout.constraint.regex=a+", "algorithm.kl_coef=0.1"]
    assert planned(models["llama"], 1, more=more).phases["update"][0].peak.total > 0


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["policy.lora.dora=true"], marks=pytest.mark.slow),
        pytest.param(["policy.lora.base=nf4"], marks=[pytest.mark.slow, needs_nf4]),
    ],
    ids=str,
)
def test_adapters_have_gradients_and_moments_and_the_frozen_weights_none(models, more):
    found, plain = (planned(models["llama"], 1, more=lines) for lines in (["policy.lora.rank=4", *more], []))
    gradients = found.phases["update"][0].peak.by_tag["policy gradients"]
    assert 0 < gradients < plain.held["policy weights"] / 5
    assert found.held["policy optimizer"] == pytest.approx(2 * gradients, rel=0.05)
    frozen = found.held["policy weights"] - gradients
    assert frozen == plain.held["policy weights"] / 2 or more == ["policy.lora.base=nf4"] and frozen < gradients * 4


@pytest.mark.parametrize("loss", ["draft", "flow_grpo"])
def test_a_step_of_pictures_is_traced(loss):
    more = [f"feedback={loss}", "feedback.kl_coef=0.1", "policy.dtype=bfloat16", "pictures.prompts_per_step=32"]
    found = pictures.trace(load("reward_fl", RewardFlConfig, ["+experiment=demo_reward_fl", *more]), 1, 2)
    update = found.phases["update"][0]
    assert found.microbatches == 16 and found.held["policy optimizer"] == 2 * found.held["policy weights"] + 4
    assert update.peak.by_tag["policy gradients"] == found.held["policy weights"]
    assert update.travelled["reduce-scatter"] and ("reference weights" in found.held) == (loss == "flow_grpo")
    # On this rank 16 micro-batches of 8 pictures of 16 x 16 pixels, with 6 latents each and 8 words; and velocities of
    # the reference at two steps, the window's.
    num_kept = 6 + 2 * (loss == "flow_grpo")
    assert update.peak.by_tag["pictures"] == 16 * 8 * (num_kept * 3 * 16 * 16 * 4 + 8 * 8)


def test_a_plan_of_diffusers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "spmd_rl.model.diffusion.pipelines", raising=False)
    cfg = load("reward_fl", RewardFlConfig, ["+experiment=reward_fl_sd3_8gpu"])
    check_plan(cfg)
    with pytest.raises(UserError, match=r"diffusers is not installed here; pip install 'spmd-rl\[diffusion\]'"):
        pictures.show(cfg)


def test_roles_that_are_saved_are_awake_together_and_a_reference_is_not():
    held = {f"{role} {kind}": 10 for role in ("policy", "critic") for kind in ("weights", "optimizer")}
    found = Trace(0, {}, held | {"reference weights": 10}, {}, None, None, 1)
    (asleep,), (awake,) = rows(found, NOTHING, True), rows(found, NOTHING, False)
    assert asleep.columns["weights"] == asleep.columns["optimizer"] == 20 and awake.columns["weights"] == 30


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trainer_and_engine_are_planned_in_one_dtype(device, models):
    cfg = load("rlvr", RlvrConfig, [f"policy.model={models['llama']}", "policy.dtype=auto", f"plan.device={device}"])
    wanted = "bfloat16" if device == "cuda" else choose_dtype(torch.device("cpu"))[0]
    assert dtype_of(cfg.policy, cfg.plan) == settings_of_plan(cfg).policy.dtype == wanted


@pytest.mark.skipif(installed("deepspeed") is None, reason="DeepSpeed is not installed")
def test_tensors_on_the_host_are_refused_where_a_device_is_planned(models):
    lines = ["train=deepspeed", "train.offload_optimizer=true"]
    with pytest.raises(UserError, match=r"train.offload_optimizer: --plan cannot tell host and device apart"):
        planned(models["llama"], 2, more=lines)


def said(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    monkeypatch.setenv("WORLD_SIZE", "4")
    cfg = load("rlvr", RlvrConfig, [*SHORT, *overrides])
    check_plan(cfg)
    show(cfg)
    return capsys.readouterr().out


def test_the_table_says_whether_it_fits_and_what_would(models, capsys, monkeypatch, tmp_path):
    folder = f"policy.model={models['llama']}"
    run = ["train.tp=2", f"run.dir={tmp_path}", "plan.reserve_gb=0", "engine.kv_tokens=64", folder]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "memory/train/peak_bytes": 7.77e9}) + "\n")
    text = said(capsys, monkeypatch, *run)
    assert "4 ranks = dp_shard 2 x tp 2" in text and "fits 80 GB" in text and "measured" in text and "7.77" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"], "it writes nothing"
    long = ["rollout.max_new_tokens=30000", "train.tokens_per_microbatch=30032", "engine.kv_tokens=30032"]
    text = said(capsys, monkeypatch, *run, *long, "plan.device_gb=0.2", "train.tp=1", "rollout.max_prompt_tokens=32")
    assert "does not fit 0.2 GB" in text
    assert "the nearest that fits: train." in text or "no layout near it fits" in text


def test_the_largest_cache_that_fits_is_named(models):
    lines = [f"policy.model={models['llama']}", "engine.max_running=100", "rollout.max_prompt_tokens=500"]
    cfg = load("rlvr", RlvrConfig, [*SHORT, *lines, "rollout.max_new_tokens=1500", "engine.kv_tokens=100000"])
    publish = TableRow("publish", {"weights": 30 * 10**9, "engine": 15 * 10**9})
    generate = TableRow("generate, evaluate", {"engine": 15 * 10**9, "KV cache": 6 * 10**9, "temporary": 2 * 10**9})
    said = largest_cache(cfg, [publish, generate])  # 80 GB - 6 - 17 at 60,000 bytes a token
    assert said == "engine.kv_tokens: up to 949248 fit; 100 running answers of full length take 200000"
    assert not largest_cache(cfg, [publish]), "ranks that only train have none"


def test_ranks_that_are_not_alike_are_planned_apart(models, capsys, monkeypatch):
    folder = f"policy.model={models['llama']}"
    run = [folder, "plan.reserve_gb=0", "engine.kv_tokens=10000000"]  # a cache of 2.56 GB

    def table(*overrides: str) -> tuple[str, dict[str, list[str]]]:
        text = said(capsys, monkeypatch, *run, *overrides)
        ranks = [part.splitlines() for part in text.split("\n\n") if "GB at the peak" in part]
        return text, {lines[0].partition(",")[0].partition(" (")[0]: lines[2:] for lines in ranks}

    def total(lines: list[str]) -> float:
        return max(float(line.split()[-1]) for line in lines if line[:3] in ("pub", "gen", "pre", "upd", "sav"))

    text, ranks = table("placement.mode=split", "placement.train=1,3")
    assert "ranks 1,3 train = dp_shard 2" in text and "groups of 2: ranks 1, 3" in text
    assert "ranks 0,2 generate: 2 replicas of native" in text
    assert set(ranks) == {"Rank 1", "Rank 0"} and total(ranks["Rank 1"]) < 1 < 2.5 < total(ranks["Rank 0"])
    text, ranks = table("placement.mode=lent")
    assert "ranks 0-1 train = dp_shard 2" in text and "ranks 0-3 generate: 4 replicas" in text
    update = [line for line in ranks["Rank 0"] if line.startswith("update")]
    assert total(update) > 2.5, "a lent rank has the trainer and the engine"
    assert not any(line.startswith("update") for line in ranks["Rank 2"]) and total(ranks["Rank 2"]) > 2.5
    text, ranks = table("placement.mode=split", "plan.rank=3", "plan.device_gb=2")
    assert set(ranks) == {"Rank 3"} and "does not fit 2 GB" in text and "need a smaller engine.kv_tokens" in text


def test_a_book_counts_each_storage_once_and_until_it_is_gone():
    with MemoryTracker() as book:
        kept = torch.zeros(1000)
        with book.window("work"):
            views = [kept[i:] for i in range(3)]
            passing = torch.ones(2000)
            del passing
            kept.untyped_storage().resize_(0)
            torch.zeros(500)
    peak = book.peak(book.span("work"))
    assert (len(views), peak.total) == (3, 12000)
    assert peak.largest == (8000, "aten::ones")


@pytest.mark.parametrize("kind", VLM_KINDS)
def test_pictures_fill_the_prompts_of_a_plan_and_a_frozen_tower_has_no_gradients(kind, tmp_path):
    toy_vlm(kind, tmp_path)
    frozen, trained = (
        planned(tmp_path, 2, more=[f"policy.freeze_vision_tower={is_frozen}", "policy.dtype=float32"])
        for is_frozen in ("true", "false")
    )
    gradients = [one.phases["update"][0].peak.by_tag["policy gradients"] for one in (frozen, trained)]
    model = shape_on_meta(tmp_path, torch.float32)
    tower = sum(p.numel() for p in model.tower.parameters)
    assert gradients[1] - gradients[0] == pytest.approx(4 * tower / 2, rel=0.05)
    assert trained.phases["update"][0].peak.total > frozen.phases["update"][0].peak.total + 2 * tower


@pytest.mark.parametrize(
    "path", [p.parent for p in sorted(CONFIGS.glob("shapes/*/config.json"))], ids=lambda path: path.name
)
def test_shapes_are_of_the_size_in_their_name(path):
    sizes = {"0.5b": 0.494, "7b": 7.616, "4b": 4.022, "72b": 72.71, "a3b": 30.53, "a22b": 235.1, "v3": 671.0}
    # With the vision tower.
    sizes |= {"qwen2.5-vl-7b": 8.292, "qwen3-vl-4b": 4.438}
    wanted = sizes.get(path.name) or sizes[path.name.rpartition("-")[2]]
    assert ModelSize.of(shape_on_meta(path, torch.bfloat16)).parameters / 1e9 == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"])
def test_a_plan_needs_no_network_for_a_model_whose_shape_we_ship(model):
    cfg = load("rlvr", RlvrConfig, [f"policy.model={model}"])
    check_plan(cfg)
    assert cfg.policy.model == str(CONFIGS / "shapes/qwen2.5-0.5b")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [p for p in sorted(CONFIGS.glob("experiment/*.yaml")) if "plan:" in p.read_text()],
    ids=lambda path: path.stem,
)
def test_each_recipe_fits_its_devices(path, capsys, monkeypatch):
    door = experiment_doors(path)[0]
    cfg = load(door, PIPELINES[door], [f"+experiment={path.stem}"])
    if is_drawn := door == "reward_fl":
        pytest.importorskip("diffusers")
    if (package := backend(cfg.train.name).package) and installed(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("WORLD_SIZE", str(cfg.plan.ranks))
    check_plan(cfg)
    (pictures.show if is_drawn else show)(cfg)
    assert ": fits 80 GB" in capsys.readouterr().out
