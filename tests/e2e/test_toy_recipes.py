"""Recipes of large models through their real doors with `+shrink=cpu`: two steps on two ranks, on made rows."""

from pathlib import Path

import pytest

from spmd_rl.config.load import CONFIGS, experiment_doors
from tests.e2e.runs import Toy

FAST = ("roll_rlvr_7b_16gpu", "roll_sokoban_8gpu")
"""One of each door; the others differ from these by their environments and sizes."""
RECIPES = [path.stem for path in sorted(CONFIGS.glob("experiment/*.yaml")) if path.stem.startswith(("roll_", "gem_"))]
PACKAGES = {"gem_math_tool_8gpu": ("gem", "datasets"), "roll_rlvr_7b_16gpu": ("langdetect", "nupunkt")}
PACKAGES["roll_rlvr_30b_a3b_32gpu"] = PACKAGES["roll_rlvr_7b_16gpu"]


class ToyRecipe(Toy):
    """A recipe at toy scale with a tiny model, whose tokenizer has a token for each byte."""

    def __init__(self, path: Path, recipe: str) -> None:
        super().__init__(path, max_position_embeddings=8192)
        (door,) = (name for name in experiment_doors(CONFIGS / f"experiment/{recipe}.yaml") if name != "evaluate")
        self.door, self._recipe = f"spmd_rl.{door}", recipe

    def settings(self) -> list[str]:
        lengths = ["rollout.max_prompt_tokens=4096", "rollout.max_context_tokens=8192"]
        return [f"+experiment={self._recipe}", "+shrink=cpu", f"policy.model={self.model}", *lengths]


@pytest.mark.parametrize(
    "recipe", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_trains_two_toy_steps_on_two_ranks(recipe: str, tmp_path: Path) -> None:
    for package in PACKAGES.get(recipe, ()):
        pytest.importorskip(package)
    run = ToyRecipe(tmp_path, recipe).run()
    lines = run.metrics()
    assert [line["step"] for line in lines if "actor/grad_norm" in line] == [1, 2]
    assert all(line["critic/score/mean"] == line["critic/score/mean"] for line in lines if "critic/score/mean" in line)
    tags = {key.split("/")[1] for line in lines for key in line if key.startswith("val/")}
    assert tags >= ({"larger_sokoban", "frozen_lake"} if "sokoban" in recipe or "lake" in recipe else set())
