"""Generation, scoring and held-out evaluation: `rollout`, `eval`."""

import re
import sys
from dataclasses import dataclass, field
from typing import ClassVar

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.values import above, at_least, one_of, require, within

CLAIMS = ("store", "static")
ACCEPTS = ("in_order", "first_finished")
TAILS = ("none", "defer")
HELD_OUT = 64
MAX_TOP_K = 1024
DEFAULT_TOP_K = 256
"""Default `top_k` under `top_p` or `min_p`; few trained distributions have more likely tokens"""


@dataclass
class FilterConfig:
    """Conditions that groups must meet to train: `rollout.filter`."""

    zero_variance: bool = False
    """Dynamic sampling: replace groups of equal scores, which have no gradient under a group baseline. On in recipes
    whose papers have it (`algorithm=dapo`, `grpo_dynamic`, ...)."""
    min_mean_score: float | None = None
    """Least mean score of a group; lower groups are dropped."""
    max_mean_score: float | None = None
    """Largest mean score of a group; higher groups are dropped."""
    max_truncated: float | None = None
    """Largest share of a group's answers cut off at `rollout.max_new_tokens`; other groups are dropped."""
    max_mean_tokens: float | None = None
    """Largest mean tokens of a group's answers; other groups are dropped."""

    def __post_init__(self) -> None:
        low, high = self.min_mean_score, self.max_mean_score
        empty = low is not None and high is not None and low > high
        require(not empty, f"min_mean_score: {low} is above max_mean_score {high}: no group can qualify")
        within(self, max_truncated=(0, 1))
        above(self, max_mean_tokens=0)


@dataclass
class SamplingConfig:
    """Settings of episodes and their sampling."""

    target: str | None = None
    """Your own episode as `module:function`, an `async def` over a context (see `spmd_rl.rollout.episode`). Default:
    one answer, one score."""
    max_prompt_tokens: int = 512
    """Token limit of a prompt after the chat template; longer ones are an error at start."""
    max_new_tokens: int = 512
    """Token limit of an answer, or of each turn."""
    max_context_tokens: int | None = None
    """Token limit of a sample with all its turns, which ends as truncated there. Default: the engine's limit."""
    max_turns: int | None = field(default=None, metadata={"agents": True})
    """Most answers in an episode, which ends as truncated there. Default: no limit."""
    temperature: float = 1.0
    """Sampling temperature of training answers, above 0."""
    top_p: float = 1.0
    """Probability share to sample from: the fewest tokens that reach it; 1: off. Training normalises logprobs over
    these tokens, which are recorded."""
    top_k: int = 0
    """Number of most likely tokens to sample from, at most 1024; 0 or -1: off, or 256 under `top_p` or `min_p`, which
    costs vLLM about 0.4 ms a token."""
    min_p: float = 0.0
    """Least probability relative to the most likely token; 0: off. Applied before `top_k`, then `top_p`, as in vLLM."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, such as `["</answer>"]`; `\\n` is a line break. The text stays in the scored and
    trained answer, whose finish reason is `stop`."""

    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)

    thinking_budget: int | None = None
    """Tokens after which unfinished thoughts are ended by `thinking_end` (null: never), whose tokens are not in the
    loss but count in `max_new_tokens`. For models that think in tags, with one answer to a prompt; in evaluation too.
    """
    thinking_end: str = "\\n</think>\\n\\n"
    """Text that ends thoughts, such as a sentence and the closing tag; `\\n` is a line break. An answer with the last
    closing tag has ended them itself."""

    @property
    def thinking_end_text(self) -> str:
        """Text of `thinking_end` with line breaks."""
        return self.thinking_end.replace("\\n", "\n")

    @property
    def thinking_tag(self) -> str:
        """Closing tag in `thinking_end`; empty without one."""
        return ([""] + re.findall(r"</[^<>]+>", self.thinking_end))[-1]

    @property
    def truncation(self) -> dict[str, float]:
        """Values of `top_k`, `top_p` and `min_p` for a request."""
        return _truncation(self.top_k, self.top_p, self.min_p)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts of `stop` with line breaks, which a command line escapes."""
        return tuple([text.replace("\\n", "\n") for text in self.stop])

    @property
    def truncates(self) -> bool:
        """True if sampling cuts tokens off."""
        return self.truncation["top_k"] > 0

    @property
    def max_answer_tokens(self) -> int:
        """Largest number of tokens over all turns of an answer; of one turn if unlimited."""
        return min(self.max_new_tokens * (self.max_turns or 1), self.max_context_tokens or sys.maxsize)

    def __post_init__(self) -> None:
        at_least(self, max_prompt_tokens=1, max_new_tokens=1, max_context_tokens=2, max_turns=1)
        above(self, temperature=0)
        require("" not in self.stop, "stop: an empty text would end every answer")
        at_least(self, thinking_budget=1)
        require(bool(self.thinking_tag), f"thinking_end: {self.thinking_end!r} has no closing tag, such as </think>")
        budget, limit = self.thinking_budget or 0, self.max_new_tokens
        require(budget < limit, f"thinking_budget: {budget} leaves nothing of max_new_tokens={limit} for the answer")
        own = budget and self.target is not None
        require(not own, "thinking_budget: an episode of your own (rollout.target) ends thoughts itself, as "
                         "spmd_rl/rollout/thinking.py does")  # fmt: skip
        _check_truncation(self)


@dataclass
class RolloutConfig(SamplingConfig):
    """Generation and scoring of a step."""

    prompts_per_step: int = 8
    """Number K of prompts, hence groups, that a step trains on."""
    answers_per_prompt: int = 8
    """Answers to each prompt, which form a group."""
    redundancy: int = field(default=0, metadata={"agents": True})
    """Spare episodes of each group: the first `answers_per_prompt` to end make the group. For slow environments; biased
    to short episodes."""
    claim: str = "store"
    """Division of prompts among engine replicas. `store`: a replica with room takes the next from a shared counter, so
    fast ones do more. `static`: dealt in turn, for exact reruns."""
    answers_per_claim: int | None = None
    """Answers of a group that a replica claims at a time; fewer than `answers_per_prompt` spread a group over replicas.
    Default: the whole group."""
    accept: str = "in_order"
    """Groups that a step trains on. `in_order`: the first K qualified in order of prompts, without length bias.
    `first_finished`: the first K finished, faster with `over_sample` but biased to short answers. Others come first in
    the next step."""
    over_sample: int = 0
    """Prompts started at once beyond K, to replace dropped or slow groups."""
    partial_rollout: bool = False
    """Continue unfinished answers in the next step with new weights, instead of restarting them. Each token keeps its
    policy's version."""
    tail: str = "none"
    """Treatment of slow prompts. `none`: wait for them. `defer`: train on the first K of K + `over_sample` groups; once
    K groups were left behind, a step trains on exactly these. So most steps do not wait, no prompt is lost, and none is
    answered by an old policy."""
    max_prompts_per_step: int | None = None
    """Most prompts that a step may start; it trains on what qualifies among them. Default: 4 K."""
    min_answers: int = 2
    """Scored answers that a group needs to qualify."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    dump: bool = False
    """Write each step's samples into `run.dir/rollouts` for replay."""
    replay: str | None = None
    """Directory of a run with `dump=true` whose samples are trained on, step by step, without engine, rewards and
    evaluation. Under that run's other settings, weights are the same to the bit (float32)."""

    @property
    def slice_size(self) -> int:
        """Answers per claim, by default the whole group."""
        return self.answers_per_claim or self.answers_per_prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, claim=CLAIMS, accept=ACCEPTS, tail=TAILS)
        at_least(self, prompts_per_step=1, answers_per_prompt=1, min_answers=1)
        at_least(self, over_sample=0, redundancy=0, max_prompts_per_step=self.prompts_per_step, answers_per_claim=1)
        fits = self.answers_per_claim is None or self.answers_per_claim <= self.answers_per_prompt
        require(fits, f"answers_per_claim: {self.answers_per_claim} is more than answers_per_prompt")
        greedy = next((key for key, value in (("top_k", self.top_k), ("min_p", self.min_p)) if value == 1), None)
        # A single candidate has probability 1, hence no gradient.
        require(greedy is None, f"{greedy}: 1 leaves one token to draw, from which nothing can be learned")
        in_order = self.accept == "in_order" and self.tail == "none"
        require(self.claim == "store" or in_order, "claim: static needs accept=in_order and tail=none")
        require(
            not (self.partial_rollout and self.tail == "defer"),
            "partial_rollout: not supported with tail, which starts a deferred prompt again; choose one of them",
        )
        enough = self.min_answers <= self.answers_per_prompt
        require(enough, f"min_answers: {self.min_answers} is more than answers_per_prompt {self.answers_per_prompt}")


@dataclass
class EvaluationConfig:
    """Held-out prompts, sampling of their answers, and metrics."""

    # An evaluation without training has a single step.
    every: ClassVar[int] = 1

    prompts: int | None = None
    """Number of held-out prompts. Default: all of `data.eval`; else 64 from `data.train`; 64 tasks of an agent."""
    answers: int = 1
    """Sampled answers to each prompt besides a greedy one; 0: greedy alone."""
    metrics: list[str] | None = None
    """Statistics of scores besides means: `ci95`, half the width of the mean's 95 % interval; `pass@4`, the chance of
    at least one right answer among 4; `maj@4`, the score of the most common of 4 results. Default: none in training; in
    evaluation all, for 1, 2, 4, ... and `answers`."""
    pass_score: float = 1.0
    """Score from which an answer is right in `pass@k`."""
    temperature: float | None = None
    """Temperature of held-out answers. Default: that of the rollout."""
    top_p: float | None = None
    """Value of `top_p` for held-out answers. Default: `rollout.top_p`."""
    top_k: int | None = None
    """Value of `top_k` for held-out answers. Default: `rollout.top_k`."""
    min_p: float | None = None
    """Value of `min_p` for held-out answers. Default: `rollout.min_p`."""

    def truncation(self, rollout: SamplingConfig) -> dict[str, float]:
        """Return `top_k`, `top_p` and `min_p` for a request."""
        own = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return _truncation(**{key: getattr(rollout, key) if value is None else value for key, value in own.items()})

    def numbers(self, kind: str) -> list[int]:
        """Return each k of `pass` or `maj` in `metrics`, ascending."""
        return sorted({int(name.partition("@")[2]) for name in self.metrics or () if name.startswith(f"{kind}@")})

    def __post_init__(self) -> None:
        at_least(self, prompts=1, answers=0)
        above(self, temperature=0)
        _check_truncation(self)
        for name in self.metrics or ():
            known = re.fullmatch(r"ci95|(?:pass|maj)@([1-9][0-9]*)", name)
            require(bool(known), f"metrics: {name!r} is unknown; known: ci95, pass@K, maj@K")
            fits = not known[1] or int(known[1]) <= self.answers
            require(fits, f"metrics: {name} needs as many answers, but answers is {self.answers}")


@dataclass
class EvalConfig(EvaluationConfig):
    """Held-out evaluation of a training run: `eval`."""

    every: int = 10
    """Steps between evaluations, also before the first step and after the last. 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, every=0)


def _truncation(top_k: int, top_p: float, min_p: float) -> dict[str, float]:
    if top_k <= 0:
        # The candidates are recorded for each token, so their number needs a bound.
        top_k = DEFAULT_TOP_K if top_p < 1 or min_p > 0 else 0
    return {"top_k": top_k, "top_p": top_p, "min_p": min_p}


def _check_truncation(section: SamplingConfig | EvaluationConfig) -> None:
    within(section, top_k=(-1, MAX_TOP_K), top_p=(0, 1), min_p=(0, 1))
    above(section, top_p=0)
