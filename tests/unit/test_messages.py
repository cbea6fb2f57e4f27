"""What a run says before its first step, in long waits, and after its last step."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.config.batch_arithmetic import describe_batch
from spmd_rl.config.model_files import describe_model, num_weights
from spmd_rl.config.schema import (
    EngineConfig,
    EvalConfig,
    PlacementConfig,
    PolicyConfig,
    RlvrConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from spmd_rl.distributed import solo
from spmd_rl.track import messages
from spmd_rl.track.run import Run


def write_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.zeros(1000, 500), "b": torch.zeros(7)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64}))
    return folder


def test_a_model_is_described_by_its_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert num_weights(folder) == 500_007
    assert describe_model(folder) == "0.5 M weights, llama, 3 layers of width 64"


def test_the_arithmetic_of_a_step(monkeypatch) -> None:
    rollout = RolloutConfig(
        prompts_per_step=6, answers_per_prompt=4, over_sample=2, max_prompt_tokens=100, max_new_tokens=28
    )
    train = TrainConfig(tp=2, updates_per_step=3)
    monkeypatch.setenv("WORLD_SIZE", "8")
    told = dict(describe_batch(rollout, train, EngineConfig(), PlacementConfig()))
    assert told["step"] == "6 prompts x 4 answers = 24 samples; 2 prompts more are started"
    assert told["generation"].startswith("8 engines, up to 512 answers at once")
    assert told["training"] == "4 data shards of about 6 samples, 3 optimizer steps a step on about 8 samples each"
    assert told["tokens"].startswith("at most 128 a sample (100 prompt + 28 answer), 3,072 a step")


def test_the_tokens_of_an_episode_of_ones_own_are_those_of_a_turn_unless_they_are_limited() -> None:
    def tokens(**settings) -> str:
        rollout = RolloutConfig(prompts_per_step=6, answers_per_prompt=4, max_prompt_tokens=100, max_new_tokens=28)
        for key, value in settings.items():
            setattr(rollout, key, value)
        return dict(describe_batch(rollout, TrainConfig(), EngineConfig(), PlacementConfig()))["tokens"]

    own = {"target": "mine:episode"}
    turn = "at most 128 in the first turn of an episode (100 prompt + 28 answer), more with each further one, 4,096 a"
    assert tokens(**own).startswith(turn)
    assert tokens(**own, max_turns=1) == tokens() != tokens(**own)
    limited = "at most 500 a sample (rollout.max_context_tokens), 12,000 a step, 4,096 a micro-batch"
    assert tokens(**own, max_context_tokens=500) == tokens(max_context_tokens=500) == limited


def test_a_run_says_what_it_is_and_what_it_left(tmp_path: Path, capsys) -> None:
    model = write_model(tmp_path / "model")
    cfg = RlvrConfig(
        steps=1,
        run=RunConfig(name="toy", dir=str(tmp_path / "run")),
        policy=PolicyConfig(model=str(model)),
        eval=EvalConfig(every=2, prompts=5),
    )
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        track.announce(16, 9)
        with track.step(1):
            track.add({"critic/score/mean": 0.5})
        folder = tmp_path / "run" / "checkpoints" / "step-000001" / "hf"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    told = capsys.readouterr().err
    for words in ("0.5 M weights", "1 on 1 node (cpu): each trains", "16 for training (0.5 epochs), 9 held out\n"):
        assert words in told, told
    assert "evaluation  5 of 9 held-out prompts x (1 sampled, 1 greedy) every 2 steps\n" in told
    end = told.split("step 1/1")[1]
    for words in ("run/report.html", "checkpoints/step-000001\n", "steps= above 1", "step-000001/hf"):
        assert words in end, end


@pytest.mark.parametrize(
    ("engine", "device", "is_told"), [("native", "cuda", 1), ("native", "cpu", 0), ("vllm", "cuda", 0)]
)
def test_our_own_engine_on_a_device_is_said_to_be_slow(tmp_path: Path, engine: str, device: str, is_told: int) -> None:
    policy = PolicyConfig(model=str(write_model(tmp_path / "model")))
    world = SimpleNamespace(device=torch.device(device), local_size=1)
    told = messages.header(RlvrConfig(policy=policy, engine=EngineConfig(name=engine)), world, 16, 9)
    assert told.count("engine=vllm") == is_told


@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
def test_a_model_is_loaded_as_what_it_is(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "checkpoints" / "step-000001" / "hf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"architectures": ["LlamaFor{kind}"]}}')
    assert f'transformers.AutoModelFor{kind}.from_pretrained("{folder}")' in messages.footer(tmp_path, 3)


def test_a_run_without_a_checkpoint_names_none(tmp_path: Path) -> None:
    assert "checkpoint" not in messages.footer(tmp_path, 3)
