"""What generating ranks hand in, as bytes, and what must be true of it before it counts.

Samples travel as msgpack of the structs in `types`, whose arrays are raw bytes. What the prompt of a piece is and what
is reported of its samples the training rank finds for itself: who makes things up can spoil its own answers only.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
from transformers import AutoConfig

from spmd_rl.config.schema import RlConfig, RolloutConfig
from spmd_rl.hub import model_folder
from spmd_rl.model.moe import num_experts
from spmd_rl.rollout.episode import SEGMENTS, Sampling
from spmd_rl.types import Group, Prompt, Sample, Turn, Verdict
from spmd_rl.types.encoded import unpack

SAMPLE_BYTES, TOKEN_BYTES = 1 << 17, 1 << 10
"""What a sample, and each of its tokens, may take at most: text, boards and routed experts included."""
MAX_SCORE = 1e9
"""What a score, or a reward of a step, may be: sums of squares over a batch of them are finite in float64."""
DEFAULT_TOKENS = 1 << 15
"""Of a sample of several turns for which no setting says how many it may have."""
DAMAGED = (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RecursionError)
"""What bytes that are no such piece raise."""


def max_piece_bytes(rollout: RolloutConfig, has_turns: bool, num_answers: int) -> int:
    """Return how large a piece of so many answers can be by these settings."""
    one_turn = rollout.max_prompt_tokens + rollout.max_new_tokens
    tokens = rollout.max_context_tokens or (DEFAULT_TOKENS if has_turns else one_turn)
    return num_answers * (SAMPLE_BYTES + tokens * (TOKEN_BYTES + 4 * rollout.top_k))


class Asked(NamedTuple):
    """What a piece is to answer."""

    prompt: Prompt
    ticket: int
    """Or the place of a held-out prompt."""
    prompt_ids: array | None
    """The tokens ('i') that are answered in one turn; None where an episode makes them."""


class PieceRules:
    """What the samples of a piece must be: pure checks, which raise one of `DAMAGED`."""

    def __init__(self, rollout: RolloutConfig, uses_greedy: bool, num_ids: int, num_experts: int = 0) -> None:
        """num_ids: of the model's vocabulary."""
        self._rollout, self._uses_greedy = rollout, uses_greedy
        self._num_ids, self._num_experts = num_ids, num_experts

    @classmethod
    def of(cls, cfg: RlConfig) -> "PieceRules":
        """Return those of a run."""
        folder, trust = model_folder(cfg.policy.model), cfg.policy.trust_remote_code
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust).get_text_config()
        return cls(cfg.rollout, cfg.generation.uses_greedy, config.vocab_size, num_experts(config))

    def group(self, payload: bytes | memoryview, asked: Asked, number: int, versions: range) -> Group:
        """Return slice `number` of a ticket. versions: those that may have sampled its tokens."""
        s = self._rollout
        first = number * s.slice_size
        size = min(s.slice_size, s.answers_per_prompt - first)
        allowed = set(range(first, first + size + s.redundancy))
        greedy = {s.answers_per_prompt} if self._uses_greedy and first + size == s.answers_per_prompt else set()
        return self._checked(payload, asked, allowed | greedy, greedy, versions, size + len(greedy))

    def held_out(self, payload: bytes | memoryview, asked: Asked, drawn: list[Sampling], version: int) -> Group:
        """Return the answers to a held-out prompt, as they were to be drawn."""
        greedy = {number for number, sampling in enumerate(drawn) if sampling.temperature == 0}
        versions, allowed = range(version, version + 1), set(range(len(drawn)))
        return self._checked(payload, asked, allowed, greedy, versions, len(drawn))

    def _checked(
        self,
        payload: bytes | memoryview,
        asked: Asked,
        allowed: Collection[int],
        greedy: Collection[int],
        versions: range,
        count: int,
    ) -> Group:
        samples, numbers = unpack(payload, tuple[Sample, ...]), []
        ends: dict[int, bool] = {}
        num_turns: Counter[int] = Counter()
        for sample in samples:
            base = sample.answer % SEGMENTS
            _require(sample.ticket == asked.ticket and 0 <= sample.answer < 1 << 31, "it is about another ticket")
            _require(base in allowed, f"it has an answer {sample.answer}")
            _require(sample.unit_number in (sample.answer, base), f"answer {base} is of another trajectory")
            _require(not ends.get(base), f"answer {base} goes on after its last segment")
            ends[base] = sample.last
            _require(sample.greedy == (base in greedy), f"answer {base} is drawn otherwise")
            _require(len(sample.turns) > 0, "a sample has no turn")
            _check_verdict(sample.verdict)
            for turn in sample.turns:
                self._check_turn(turn, versions)
            num_turns[base] += len(sample.turns)
            self._check_size(sample, num_turns[base], asked.prompt_ids)
            numbers.append(sample.answer)
        _require(numbers == sorted(set(numbers)), "its answers are not in order")
        _require(all(ends.values()), "an answer has no last segment")
        _require(len(ends) == count, f"it has {len(ends)} answers of {count}")
        return Group(asked.prompt, asked.ticket, samples)

    def _check_size(self, sample: Sample, num_turns: int, prompt_ids: array | None) -> None:
        """num_turns: of the trajectory, this sample's included."""
        s, turns = self._rollout, sample.turns
        _require(num_turns <= (s.max_turns or inf if prompt_ids is None else 1), f"it has {num_turns} turns")
        _require(prompt_ids in (None, turns[0].prompt_ids), "it answers another prompt")
        _require(max(len(turn.token_ids) for turn in turns) <= s.max_new_tokens, "an answer is too long")
        num_tokens = sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in turns)
        _require(num_tokens <= (s.max_context_tokens or inf), f"a sample has {num_tokens} tokens")

    def _check_turn(self, turn: Turn, versions: range) -> None:
        ids, tokens, logprobs = _column(turn.prompt_ids, "i"), _column(turn.token_ids, "i"), _column(turn.logprobs, "f")
        served = _column(turn.versions, "i")
        _require(len(tokens) == len(logprobs) == len(served), "the columns of a turn differ in length")
        _require(bool(np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()), "a logprob is none")
        for some in (ids, tokens):
            self.check_ids(some)
        low, high = versions.start, versions.stop
        _require(bool(((served >= low) & (served < high)).all()), f"a token is not of versions {low} to {high - 1}")
        if turn.candidate_ids is not None:
            counts, candidate_ids = _column(turn.candidate_ids.counts, "i"), _column(turn.candidate_ids.ids, "i")
            whole = len(counts) == len(tokens) and bool((counts >= 0).all()) and int(counts.sum()) == len(candidate_ids)
            _require(whole, "the candidate_ids of a turn do not fit its tokens")
            self.check_ids(candidate_ids)
        if turn.experts is not None:
            experts = _column(turn.experts, "h")
            known = bool(((experts >= -1) & (experts < self._num_experts)).all())
            _require(known and not len(experts) % max(1, len(tokens)), "the experts of a turn do not fit its tokens")
        if turn.step is not None:
            _check_numbers([turn.step.reward, *turn.step.metrics.values()], "a number of a step")
            _require(-(1 << 63) <= turn.step.state < 1 << 64, "a state of a step is none")

    def check_ids(self, ids: np.ndarray | Sequence[int]) -> None:
        """ValueError unless all of these are token ids of the model."""
        ids = np.asarray(ids, np.int64)
        _require(bool(((ids >= 0) & (ids < self._num_ids)).all()), "a token id is not the model's")


def _column(values: array, typecode: str) -> np.ndarray:
    _require(values.typecode == typecode, f"a column is of type {values.typecode}, not {typecode}")
    return np.frombuffer(values, np.dtype(typecode)) if values else np.empty(0, np.dtype(typecode))


def _check_verdict(verdict: Verdict) -> None:
    _check_numbers([verdict.score, *verdict.parts.values()], "a score")


def _check_numbers(numbers: Sequence[float], what: str) -> None:
    """Sums over a step must stay finite, or one member's piece ends the run."""
    sane = np.abs(np.asarray(numbers, np.float64)) <= MAX_SCORE  # false of NaN too
    _require(bool(sane.all()), f"{what} is none, or beyond {MAX_SCORE:g}")


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
