"""A rewarder whose scores are mixed whatever a model says."""

import time

from spmd_rl.types import AnswerInfo, Prompt, Verdict


class ParityReward:
    """1 where the characters' sum is even; `sleep` seconds of work first."""

    def __init__(self, sleep: float = 0.0) -> None:
        self.sleep = sleep

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        time.sleep(self.sleep)
        return Verdict("ok", float(sum(map(ord, answer)) % 2 == 0))

    @classmethod
    def examples(cls):
        prompt = Prompt("0" * 32, (), "toy", "")
        yield prompt, "b", 1.0
        yield prompt, "a", 0.0
