"""A rewarder behind your own HTTP server: each answer is sent as JSON, and the verdict comes back as JSON.

    POST <url>
    {"prompt": {"id": "9f..", "messages": [{"role": "user", "content": "2 + 2?"}], "domain": "math",
                "ground_truth": "4", "extra": {}, "priority": 0.0},
     "answer": "It is 4.", "info": {"num_tokens": 5, "finish_reason": "stop", "turns": 1}}

    200
    {"status": "ok", "score": 1.0, "parts": {"correct": 1.0}, "detail": ""}

The reply needs only `score`, or `status` and `detail` for `timeout`, `error` and `rejected`, which have no score. Calls
are repeated if that may help (`Http` in `spmd_rl.types`). An unreachable server or an invalid reply is an `error`, a
missing reply a `timeout`; never a zero. Answers are not batched: many calls are in flight at once anyway.

    reward.math.target=rewards.remote:RemoteReward reward.math.args.url=http://10.0.0.7:8000/score
"""

import os
from collections.abc import Iterator
from typing import get_args

from msgspec import to_builtins

from spmd_rl.types import AnswerInfo, Http, Message, Prompt, Verdict, VerdictStatus


class RemoteReward:
    """A rewarder that returns the server's verdict."""

    def __init__(self, url: str, http: Http, token_env: str | None = None) -> None:
        """Name in `token_env` the environment variable of a bearer token; settings never hold one."""
        self._url, self._http = url, http
        self._headers = {"Authorization": f"Bearer {os.environ[token_env]}"} if token_env else {}

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Ask the server. ValueError for a reply that is no verdict."""
        question = to_builtins({"prompt": prompt, "answer": answer, "info": info})
        question["prompt"].pop("where", None)  # a path of this machine is of no use elsewhere
        reply = await self._http.post(self._url, question, self._headers)
        if not isinstance(reply, dict) or not isinstance(reply.get("parts", {}), dict):
            raise ValueError(f"the reply is not a verdict: {str(reply)[:200]}")
        status = reply.get("status", "ok")
        if status not in get_args(VerdictStatus):
            raise ValueError(f"unknown status {status!r:.100}")
        verdict = Verdict(status, detail=str(reply.get("detail", "")))
        if not verdict.scored:
            return verdict
        numbers = {"score": reply.get("score"), **reply.get("parts", {})}
        for name, number in numbers.items():
            # A bool is an int in Python, but a server that sends one has made a mistake.
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"`{name:.100}` is not a number: {number!r:.100}")
        return Verdict(status, float(numbers.pop("score")), numbers, verdict.detail)

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield answers for a server that looks for the ground truth in the answer, with their scores."""
        for answer, score in (("It is 4.", 1.0), ("It is 5.", 0.0)):
            yield Prompt("0" * 32, (Message("user", "2 + 2?"),), "remote", "4"), answer, score
