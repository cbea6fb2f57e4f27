"""The numbers of TRL 1.16.0 that `test_trl_advantages.py` holds ours to, from TRL's own lines.

    pip download trl==1.16.0 --no-deps -d /tmp/trl && unzip -q /tmp/trl/*.whl -d /tmp/trl
    python tests/unit/algo/trl_advantages.py /tmp/trl/trl

TRL's advantages stand in the middle of long methods: those lines are cut out and run, the rest of TRL is not imported.
"""

import runpy
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch

NAN = float("nan")
REWARDS = [[1.0, 0.0, 0.5, NAN], [0.25, 0.25, 0.25, 0.25], [1.0, 1.0, 0.0, 0.0], [-0.5, 2.0, 0.125, 0.75]]
"""Four prompts with four answers each; NaN is an answer without a score."""
LENGTHS = (10, 80, 81, 90, 100, 101)
ANSWERS = ([1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1], [1], [])


def run(path: Path, first: str, last: str, names: dict[str, object]) -> dict[str, object]:
    """All names after the lines from the one that holds `first` to the next that holds `last`."""
    lines = path.read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i in range(start, len(lines)) if last in lines[i])
    names = {"torch": torch, **names}
    exec(textwrap.dedent("\n".join(lines[start : end + 1])), names)
    return names


def main(trl: Path) -> None:
    """Print one line per estimator."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(-1, 1)
    shared = run(trl / "trainer/utils.py", "def nanstd(", "return std.squeeze(dim)", {})
    shared |= {"rewards_per_func": rewards, "unscorable_mask": rewards.isnan().all(dim=1)}
    shared |= {"num_generations": 4, "device": "cpu"}
    end, weights = "advantages = torch.nan_to_num(advantages, nan=0.0)", torch.ones(1, dtype=torch.float64)
    for scale in ("group", "none", "batch"):
        args = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale, "reward_weights": weights}
        names = shared | {"self": SimpleNamespace(**args)}
        start = 'if self.multi_objective_aggregation == "sum_then_normalize"'
        print("grpo", scale, run(trl / "trainer/grpo_trainer.py", start, end, names)["advantages"].tolist())
    args = {"beta": 0.0, "reward_clip_range": None, "normalize_advantages": False, "reward_weights": weights}
    names, start = shared | {"self": SimpleNamespace(**args)}, "rewards = (rewards_per_func * self.reward_weights"
    print("rloo", run(trl / "trainer/rloo_trainer.py", start, end, names)["advantages"].tolist())
    others = runpy.run_path(str(trl / "rewards/other_rewards.py"))
    print("overlong", others["get_soft_overlong_punishment"](100, 20)([[1] * n for n in LENGTHS]))
    print("repetition", others["get_repetition_penalty_reward"](2, -1.0)(list(ANSWERS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
