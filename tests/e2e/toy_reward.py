"""A rewarder whose scores are mixed whatever a model says."""

import json
import time

from spmd_rl.types import AnswerInfo, Prompt, Verdict


class ParityReward:
    """1 where the characters' sum is even; `sleep` seconds of work first. Answers vote for what the sum is modulo 3."""

    def __init__(self, sleep: float = 0.0, log: str = "") -> None:
        """log: a file that gets a line for each answer, before its verdict is sent."""
        self.sleep, self.log = sleep, log

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        time.sleep(self.sleep)
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps([prompt.id, answer]) + "\n")
        total = sum(map(ord, answer))
        return Verdict("ok", float(total % 2 == 0), answer=str(total % 3))

    @classmethod
    def examples(cls):
        prompt = Prompt("0" * 32, (), "toy", "")
        yield prompt, "b", 1.0
        yield prompt, "a", 0.0
