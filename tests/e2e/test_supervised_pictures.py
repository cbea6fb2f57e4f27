"""Supervised learning on rows with pictures through the real door: it learns, and resumes to the bit after kill -9."""

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.drawn_shapes import write_shapes
from tests.e2e.runs import Running
from tests.e2e.test_supervised import Pairs, Written, measured
from tests.toy_vlm import toy_vlm


class Seen(Written):
    """A small Qwen2.5-VL and questions about drawn shapes."""

    kind = "qwen2_5_vl"

    def __init__(self, path: Path, pipeline: str = "sft") -> None:
        toy_vlm(self.kind, path / "model", tower={"initializer_range": 0.1})
        write_shapes(path, 23, 0)
        super().__init__(path, pipeline)

    def row(self, number: int) -> dict:
        asked = [{"type": "image"}, {"type": "text", "text": f"say {number % 3}"}]
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{number} " * (1 + number % 3)}]
        return {"messages": said, "images": [f"train/{number}.png"]}


class SeenPairs(Seen, Pairs):
    own = ("policy.lr=1e-3", "policy.freeze_vision_tower=false")

    def row(self, number: int) -> dict:
        asked = [{"type": "image"}, {"type": "text", "text": f"say {number % 3}"}]
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (f"{number} ", "no"))
        said = {"prompt": [{"role": "user", "content": asked}], "chosen": chosen, "rejected": rejected}
        return said | {"images": [f"train/{number}.png"]}


class SeenWithAdapters(Seen):
    kind = "qwen3_vl"
    own = ("policy.lora.rank=4", "policy.lr=3e-2", "eval.rows=3")


KINDS = {"sft": (Seen, "sft"), "dpo": (SeenPairs, "dpo"), "adapters": (SeenWithAdapters, "sft")}


@pytest.fixture(scope="module", params=KINDS)
def toy(request, tmp_path_factory) -> Seen:
    kind, pipeline = KINDS[request.param]
    return kind(tmp_path_factory.mktemp(request.param), pipeline)


@pytest.fixture(scope="module")
def straight(toy: Seen) -> Running:
    return toy.run("checkpoint.export_hf=true", name="straight")


def test_it_learns_alike_on_any_number_of_ranks(toy: Seen, straight: Running) -> None:
    lines = measured(straight)
    assert lines[4][toy.metric] < 0.95 * lines[1][toy.metric]
    alone = measured(toy.run("steps=1", ranks=0, name="alone"))
    assert alone[1][toy.metric] == pytest.approx(lines[1][toy.metric], rel=1e-5)
    assert alone[1]["actor/grad_norm"] == pytest.approx(lines[1]["actor/grad_norm"], rel=1e-4)


def test_killed_and_started_again_it_is_the_same_to_the_bit(toy: Seen, straight: Running) -> None:
    run = toy.linger("collective prepare: samples", "checkpoint.export_hf=true", name="killed", torchrun=True)
    run.wait_for("collective prepare: samples")
    os.kill(run.pid("rank-1"), signal.SIGKILL)
    assert run.wait(60) != 0
    again = toy.run("checkpoint.export_hf=true", name="killed")
    assert "resumed from step" in again.text() and measured(again) == measured(straight)
    ours, theirs = again.weights(4), straight.weights(4)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_export_loads_and_keeps_a_frozen_tower(toy: Seen, straight: Running) -> None:
    folder = straight.run_dir / "checkpoints" / "step-000004" / "hf"
    loaded, before = (
        dict(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).named_parameters())
        for path in (folder, toy.model)
    )
    same = {name for name in before if torch.equal(loaded[name], before[name])}
    tower = {name for name in before if ".visual." in name}
    assert (tower <= same) == ("policy.freeze_vision_tower=false" not in toy.own)
    assert same < before.keys()
