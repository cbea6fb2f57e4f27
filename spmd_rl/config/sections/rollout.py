"""Generation and scoring of a step, and held-out evaluation: `rollout`, `eval`."""

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
"""Default number of held-out prompts without a separate file"""
MAX_TOP_K = 1024
DEFAULT_TOP_K = 256
"""Value of `top_k` where `top_p` or `min_p` is used without it. Few distributions of a trained model have more likely
tokens.
"""


@dataclass
class FilterConfig:
    """Conditions for groups to qualify for training: `rollout.filter`."""

    zero_variance: bool = False
    """Dynamic sampling: drop groups whose scores are all equal, which have no gradient under a group baseline, and
    generate others in their place. Recipes whose papers have it (`algorithm=dapo`, `grpo_dynamic`, ...) turn it on."""
    min_mean_score: float | None = None
    """Least mean score of a group; groups below it are dropped (too hard)."""
    max_mean_score: float | None = None
    """Largest mean score of a group; groups above it are dropped (too easy)."""
    max_truncated: float | None = None
    """Largest share of a group's answers that may be cut off at `rollout.max_new_tokens`; other groups are dropped."""
    max_mean_tokens: float | None = None
    """Largest mean number of tokens of a group's answers; other groups are dropped."""

    def __post_init__(self) -> None:
        low, high = self.min_mean_score, self.max_mean_score
        empty = low is not None and high is not None and low > high
        require(not empty, f"min_mean_score: {low} is above max_mean_score {high}: no group can qualify")
        within(self, max_truncated=(0, 1))
        above(self, max_mean_tokens=0)


@dataclass
class SamplingConfig:
    """Settings of episodes and of sampling."""

    target: str | None = None
    """`module:function` of your own episode, an `async def` over a context (see `spmd_rl.rollout.episode`). By default
    an episode asks once and scores once.
    """
    max_prompt_tokens: int = 512
    """Token limit of a prompt after the chat template. A longer one is an error at start."""
    max_new_tokens: int = 512
    """Token limit of an answer, or of each turn of an episode with several."""
    max_context_tokens: int | None = None
    """Token limit of a sample, with all its prompts and turns. One that reaches it ends as truncated. Default: the
    engine's own limit.
    """
    max_turns: int | None = field(default=None, metadata={"agents": True})
    """Largest number of answers in an episode. One that asks for more ends as truncated. By default
    there is no limit.
    """
    temperature: float = 1.0
    """Sampling temperature of training answers; it must be above 0."""
    top_p: float = 1.0
    """Probability share to sample from: the fewest tokens that reach it are kept; 1: off. Training then normalises
    logprobs over the kept tokens, which are recorded for each sampled token.
    """
    top_k: int = 0
    """Number of most likely tokens to sample from, at most 1024; 0 or -1: off, or 256 if `top_p` or `min_p` is used. A
    large one slows vLLM down: with 256 by about 0.4 ms a token.
    """
    min_p: float = 0.0
    """Least probability of a token relative to the most likely one; 0: off. Applied first, then `top_k`, then `top_p`
    to the rest, as in vLLM.
    """
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, such as `["</answer>"]`; a backslash and an n are a line break. The text stays in the
    answer that is scored and trained on; nothing is sampled after the token that completes it, and the finish reason is
    `stop`.
    """

    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)

    thinking_budget: int | None = None
    """Number of tokens after which unfinished thoughts are ended by `thinking_end` (null: never). Its tokens are not
    sampled: they have no part in the loss, and count in `max_new_tokens`. For models that think in tags, with one
    answer to a prompt; held-out answers too.
    """
    thinking_end: str = "\\n</think>\\n\\n"
    """Text that ends thoughts, such as a sentence and the closing tag; a backslash and an n are a line break. An answer
    that contains its last closing tag has ended its thoughts by itself.
    """

    @property
    def thinking_end_text(self) -> str:
        """Text of `thinking_end` with its line breaks."""
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
        """Texts of `stop` with line breaks, which a command line can only write as escapes."""
        return tuple([text.replace("\\n", "\n") for text in self.stop])

    @property
    def truncates(self) -> bool:
        """True if tokens are cut off from the distribution."""
        return self.truncation["top_k"] > 0

    @property
    def max_answer_tokens(self) -> int:
        """Largest number of tokens of an answer over all its turns; of one turn if turns are unlimited."""
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
    """Generation and scoring of one step."""

    prompts_per_step: int = 8
    """Number K of prompts, and so of groups of answers, that a step trains on."""
    answers_per_prompt: int = 8
    """Number of answers to each prompt, which form a group."""
    redundancy: int = field(default=0, metadata={"agents": True})
    """Number of spare episodes of each group: the first `answers_per_prompt` to end make the group, and the others are
    dropped. For environments of which some are slow; biased to short episodes.
    """
    claim: str = "store"
    """Division of prompts among the replicas of the engine. `store`: a replica with room takes the next prompt from a
    shared counter, so that a fast one does more. `static`: they are dealt out in turn, which makes reruns exact.
    """
    answers_per_claim: int | None = None
    """Number of answers of a group that a replica takes at a time. With fewer than `answers_per_prompt` several
    replicas may share a group. Default: the whole group.
    """
    accept: str = "in_order"
    """Choice of the groups that a step trains on. `in_order`: the first K that qualify in the order of their prompts,
    which has no length bias. `first_finished`: the first K to finish, which is faster with `over_sample` and biased to
    short answers. The others come first in the next step.
    """
    over_sample: int = 0
    """Number of prompts that are started at once beyond K, so that dropped groups need no second round and slow ones
    can be left behind.
    """
    partial_rollout: bool = False
    """Continue answers that are unfinished at the end of a step in the next one, with the new weights, instead of
    starting them again. Each token keeps the version of the policy that sampled it."""
    tail: str = "none"
    """Treatment of slow prompts. `none`: a step waits for them. `defer`: a step trains on the first K of its K +
    `over_sample` groups to finish, and once K groups have been left behind, a step trains on exactly these and waits
    for the longest. So most steps do not wait for slow prompts, no prompt is lost, and none is answered by an old
    policy.
    """
    max_prompts_per_step: int | None = None
    """Largest number of prompts that a step may start. If fewer than K groups qualify among them, it trains on those.
    The default is 4 K.
    """
    min_answers: int = 2
    """Number of scored answers that a group needs to qualify."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    dump: bool = False
    """Write the samples of each step into `run.dir/rollouts`, as training sees them, so that another run can replay
    them.
    """
    replay: str | None = None
    """Directory of a run with `dump=true`: train on its samples, step by step. There is no engine, no reward is
    computed, and nothing is evaluated. With the other settings of that run the weights are the same to the bit
    (float32).
    """

    @property
    def slice_size(self) -> int:
        """Number of answers per claim: `answers_per_claim`, or the whole group by default."""
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
    """Held-out prompts, the sampling of their answers, and the metrics of their scores."""

    # An evaluation without training has a single step.
    every: ClassVar[int] = 1

    prompts: int | None = None
    """Number of held-out prompts; all of them, if there are fewer. Default: all of `data.eval`; 64 of those held out of
    `data.train`; 64 tasks of an agent.
    """
    answers: int = 1
    """Number of sampled answers to each prompt, in addition to one greedy answer; 0: the greedy one alone."""
    metrics: list[str] | None = None
    """Statistics of the scores in addition to their means: `ci95`, half the width of the 95 % interval of a mean;
    `pass@4`, the chance that at least one of 4 sampled answers is right; `maj@4`, the score of the most common result
    of 4. Default: none in training; in an evaluation all of them, for 1, 2, 4, ... and `answers`.
    """
    pass_score: float = 1.0
    """Score from which an answer counts as right in `pass@k`."""
    temperature: float | None = None
    """Sampling temperature of held-out answers. Default: that of the rollout."""
    top_p: float | None = None
    """Value for sampled held-out answers. Default: `rollout.top_p`."""
    top_k: int | None = None
    """Value for sampled held-out answers. Default: `rollout.top_k`."""
    min_p: float | None = None
    """Value for sampled held-out answers. Default: `rollout.min_p`."""

    def truncation(self, rollout: SamplingConfig) -> dict[str, float]:
        """Return `top_k`, `top_p` and `min_p` for a request."""
        own = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return _truncation(**{key: getattr(rollout, key) if value is None else value for key, value in own.items()})

    def numbers(self, kind: str) -> list[int]:
        """Return every k for which `metrics` has `kind` (`pass` or `maj`), ascending."""
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
    """Settings of held-out evaluation: `eval`."""

    every: int = 10
    """Number of steps between evaluations, with one before the first step and one after the last too. 0: no
    evaluations.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, every=0)


def _truncation(top_k: int, top_p: float, min_p: float) -> dict[str, float]:
    """Return request values in which every truncation includes a `top_k`: the kept tokens are recorded for each sampled
    one.
    """
    if top_k <= 0:
        # The candidates are recorded for each token, so their number needs a bound.
        top_k = DEFAULT_TOP_K if top_p < 1 or min_p > 0 else 0
    return {"top_k": top_k, "top_p": top_p, "min_p": min_p}


def _check_truncation(section: SamplingConfig | EvaluationConfig) -> None:
    within(section, top_k=(-1, MAX_TOP_K), top_p=(0, 1), min_p=(0, 1))
    above(section, top_p=0)
