"""A soft limit to the length of answers, as a term of a reward: 0.0, then falling to -1.0 at the limit.

Yu et al. 2025 (DAPO), equation 13, with `max_tokens` for L_max and `buffer` for L_cache.

    reward.math.args.parts.length={target: rewards.length:LengthReward, args: {max_tokens: 4096}, weight: 1}
"""

from collections.abc import Iterator

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict


class LengthReward:
    """A rewarder with 0.0 up to `max_tokens - buffer` tokens, from there linear, -1.0 at `max_tokens` and beyond."""

    def __init__(self, max_tokens: int = 1024, buffer: int = 256) -> None:
        """Set the limit and its buffer, both in tokens of the answer that the policy sampled."""
        if not 0 < buffer <= max_tokens:
            raise ValueError(f"buffer={buffer}: must be from 1 to max_tokens={max_tokens}")
        self._max_tokens, self._buffer = max_tokens, buffer

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score by `info.num_tokens` alone."""
        over = info.num_tokens - (self._max_tokens - self._buffer)
        return Verdict("ok", -min(max(over / self._buffer, 0.0), 1.0), {"num_tokens": float(info.num_tokens)})

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield answers of various lengths with their scores; the test counts words for tokens."""
        for num_words, score in ((1, 0.0), (768, 0.0), (896, -0.5), (1024, -1.0), (2000, -1.0)):
            yield Prompt("0" * 32, (Message("user", "?"),), "length", ""), "word " * num_words, score
