"""Agents that see their world through the real door: each turn has its picture, in the engine and in training."""

from pathlib import Path

import pytest

from tests.e2e.runs import EXACT
from tests.e2e.test_agents import AgentToy
from tests.toy_vlm import toy_vlm

LAKE = (
    "env.lake.target=envs.frozen_lake:FrozenLake",
    "env.lake.args.observation=picture",
    "env.lake.args.is_slippery=false",
)


class SeeingToy(AgentToy):
    """A small Qwen2.5-VL on drawn boards."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, path / "model"
        toy_vlm("qwen2_5_vl", self.model, tower={"initializer_range": 0.08}, max_position_embeddings=2048)

    def settings(self) -> list[str]:
        kept = [line for line in super().settings() if not line.startswith(("env.echo", "rollout.max_prompt_tokens"))]
        return [*kept, *LAKE, "rollout.max_prompt_tokens=700", *EXACT]


@pytest.mark.parametrize("history", ["null", "1"])
def test_each_turn_sees_its_board(tmp_path: Path, history: str) -> None:
    run = SeeingToy(tmp_path).run("steps=2", f"env.lake.history={history}", name="run")
    for line in run.metrics()[2:]:
        assert line["train_infer/abs_diff/mean"] < 1e-5
    shown = run.samples(2)
    counts = [[len(turn["pictures"]) for turn in sample["turns"]] for sample in shown]
    # A fresh prompt has the last board and the present one; in one conversation each turn adds its own.
    wanted = {1} if history == "null" else {1, 2}
    assert {count for sample in counts for count in sample} == wanted
    files = {path for sample in shown for turn in sample["turns"] for path in turn["pictures"]}
    assert len(files) > 1 and all((run.run_dir / "samples" / path).is_file() for path in files)
