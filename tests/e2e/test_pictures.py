"""RL on prompts with pictures through the real door: killed and resumed to the bit, split, and with vLLM."""

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.drawn_shapes import write_shapes
from tests.e2e.runs import EXACT, Running, Toy
from tests.engines import needs_vllm
from tests.toy_vlm import toy_vlm

SETTINGS = (*EXACT, "steps=3")


class PictureToy(Toy):
    """A small Qwen2.5-VL, and questions about drawn shapes: few texts, and a picture of its own for each."""

    def __init__(self, path: Path, kind: str = "qwen2_5_vl", rows: int = 24, **sizes: object) -> None:
        self.path, self.model, self.data = path, path / "model", path / "rows.jsonl"
        toy_vlm(kind, self.model, tower={"initializer_range": 0.08}, **sizes)
        drawn = write_shapes(path, rows, 0, "drawn").read_text().splitlines()
        lines = [json.loads(line) for line in drawn]
        shown = [
            {"prompt": row["question"], "images": row["images"], "ground_truth": str(number), "domain": "toy"}
            for number, row in enumerate(lines)
        ]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in shown))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return PictureToy(tmp_path_factory.mktemp("toy"))


def killed_and_resumed(toy: Toy, point: str, *settings: str) -> Running:
    """A run whose second rank was killed at a point of its second step, and which the same line has ended."""
    how = {"name": f"killed-{point.split()[1].strip(':')}", "torchrun": True}
    run = toy.linger(point, *settings, **how)
    run.wait_for(point, rank=1)
    os.kill(run.pid("rank-1"), signal.SIGKILL)
    assert run.wait() != 0 and run.outlived() == []
    return toy.run(*settings, name=how["name"])


def same(run: Running, straight: Running) -> bool:
    """Samples and weights of all steps, to the bit."""
    ours, theirs = run.weights(3), straight.weights(3)
    assert [run.samples(step) for step in (1, 2, 3)] == [straight.samples(step) for step in (1, 2, 3)]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_engine_and_trainer_see_the_same_pictures(toy: Toy, straight: Running) -> None:
    for line in straight.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < 1e-5
        assert line["publish/probe_abs_diff"] < 1e-5
        assert line["actor/grad_norm"] > 1e-3
    prompts = [tuple(s["turns"][0]["prompt_ids"]) for step in (1, 2, 3) for s in straight.samples(step)]
    texts = {tuple(max(id, -1) for id in prompt) for prompt in prompts}
    assert len(texts) < len({*prompts}), "equal texts with different pictures"


@pytest.mark.parametrize("point", ["progress generate", "collective update: backward of micro-batch 1/1"])
def test_a_killed_run_resumes_to_the_bit(toy: Toy, straight: Running, point: str) -> None:
    assert same(killed_and_resumed(toy, point, *SETTINGS), straight)


def test_split_on_policy_is_the_colocated_run_to_the_bit(toy: Toy) -> None:
    alone = toy.run(*SETTINGS, ranks=1, name="alone")
    split = toy.run(*SETTINGS, "placement.mode=split", "placement.max_staleness=0", name="split")
    assert same(split, alone)


def test_answers_carried_to_the_next_step_keep_their_pictures(toy: Toy) -> None:
    carried = ("rollout.partial_rollout=true", "rollout.over_sample=4", "rollout.max_new_tokens=24")
    run = toy.run(*carried, "policy.dtype=float32", "engine.max_running=4", "steps=3", name="carried")
    turns = [turn for step in (1, 2, 3) for s in run.samples(step) for turn in s["turns"]]
    assert any(len(set(turn["versions"])) > 1 for turn in turns)


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM's models of pictures import torchvision"
)
def test_vllm_answers_like_the_trainer_and_resumes_to_the_bit(tmp_path: Path) -> None:
    toy, settings = PictureToy(tmp_path, hidden_size=128), (*SETTINGS, "engine=vllm", "policy.lr=1e-4")
    straight = toy.run(*settings, name="vllm")
    for line in straight.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < 1e-5 and line["publish/probe_abs_diff"] < 1e-5
    assert same(killed_and_resumed(toy, "progress generate", *settings), straight)
