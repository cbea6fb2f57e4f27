"""A reward model that is trained here scores PPO's answers, and they become what its pairs prefer."""

import json
import random
import statistics
import string
from pathlib import Path

import pytest

from tests.e2e.runs import Toy
from tests.e2e.test_supervised import Ranked

STEPS = 60
NOTHING_ELSE = ("eval.every=0", "checkpoint.every=0")


class Letters(Ranked):
    """Of two answers, that with more small letters is chosen."""

    def row(self, number: int) -> dict:
        draw = random.Random(number)
        texts = ["".join(draw.choices(string.printable[:94] + "\ufffd" * 60, k=6)) for _ in range(2)]
        texts[0] = texts[0][:3] + "".join(draw.choices(string.ascii_lowercase, k=3))
        rejected, chosen = sorted(texts, key=small)
        return {"prompt": f"say {number % 40}", "chosen": chosen, "rejected": rejected}


def small(text: str) -> int:
    return sum(letter in string.ascii_lowercase for letter in text)


@pytest.mark.slow
def test_ppo_learns_what_a_reward_model_trained_here_prefers(tmp_path: Path) -> None:
    pairs = Letters(tmp_path / "pairs", "reward_model")
    pairs.data.write_text("".join(json.dumps(pairs.row(number)) + "\n" for number in range(2000)))
    given = ["steps=120", "data.rows_per_step=32", "policy.lr=3e-3", "center_coef=0", *NOTHING_ELSE]
    judge = pairs.run(*given, name="judge", ranks=0)
    assert statistics.fmean(line["rewards/accuracies"] for line in judge.metrics()[-10:]) > 0.8

    toy = Toy(tmp_path / "toy")
    model = tmp_path / "pairs" / "judge" / "checkpoints" / "step-000120" / "hf"
    reward = ("reward.toy.target=rewards.reward_model:ModelReward", f"reward.toy.args.model={model}")
    how = ["algorithm=ppo", f"steps={STEPS}", "rollout.answers_per_prompt=8", "policy.lr=2e-3", "critic.lr=3e-3"]
    more = ["reward.toy.timeout=40", "journal.stall_seconds=300", *NOTHING_ELSE]
    run = toy.run(*reward, *how, *more, ranks=0, name="ppo")
    scores = [line["critic/score/mean"] for line in run.metrics()[1:]]
    assert statistics.fmean(scores[-10:]) > statistics.fmean(scores[:10]) + 0.5
