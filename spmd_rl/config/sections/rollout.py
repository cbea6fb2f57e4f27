"""Generation and scoring of a step, and held-out evaluation: `rollout`, `eval`."""

from dataclasses import dataclass, field

from spmd_rl.config.values import above, at_least, one_of, require, within

CLAIMS = ("store", "static")
ACCEPTS = ("ticket", "arrival")
TAILS = ("none", "defer")


@dataclass
class FilterConfig:
    """Which groups qualify for training: `rollout.filter`."""

    zero_variance: bool = True
    """Drop groups whose scores are all equal: they carry no gradient."""
    min_mean_score: float | None = None
    """Drop groups whose mean score lies below (too hard)."""
    max_mean_score: float | None = None
    """Drop groups whose mean score lies above (too easy)."""
    max_truncated: float | None = None
    """Drop groups in which a larger share of the answers was cut off at `rollout.max_new_tokens`."""
    max_mean_tokens: float | None = None
    """Drop groups whose answers are longer than this on average, in tokens."""

    def __post_init__(self) -> None:
        low, high = self.min_mean_score, self.max_mean_score
        empty = low is not None and high is not None and low > high
        require(not empty, f"min_mean_score: {low} lies above max_mean_score {high}: no group can qualify")
        within(self, max_truncated=(0, 1))
        above(self, max_mean_tokens=0)


@dataclass
class RolloutConfig:
    """Generation and scoring of one step."""

    prompts_per_step: int = 8
    """K: groups that a step trains on."""
    answers_per_prompt: int = 8
    """Samples in a group."""
    max_prompt_tokens: int = 512
    """A longer rendered prompt is an error at start."""
    max_new_tokens: int = 12
    """Token limit of an answer."""
    temperature: float = 1.0
    """Sampling temperature; 0 is refused in training."""
    top_k: int = -1
    """Only -1 (off): see `top_p`."""
    top_p: float = 1.0
    """Only 1 (off): tokens cut from the distribution have no logprob, and the importance ratio would be meaningless."""
    claim: str = "store"
    """`store`: replicas claim tickets from one atomic counter as slots free up. `static`: dealt round-robin (exact)."""
    answers_per_ticket: int | None = None
    """Answers that a replica claims together; below `answers_per_prompt` several replicas may share a group. Default:
    the whole group."""
    accept: str = "ticket"
    """`ticket`: the first K qualifying tickets in ticket order, free of length bias. `arrival`: the first K to be
    finished: faster with `extra_prompts`, and biased to short answers; the others come first in the next step."""
    extra_prompts: int = 0
    """Tickets started beyond K at once: filtered groups need no second round, and slow ones can be left behind."""
    carry: bool = False
    """What is unfinished at the end of a step goes on in the next one with the new weights, instead of starting again.
    Each token keeps the version of the policy that sampled it."""
    tail: str = "none"
    """`defer`: steps take the first K of K + `extra_prompts` tickets to arrive, until K have been left behind; the next
    step trains on exactly these and waits for the longest. No prompt is lost, none is trained on by an older policy."""
    max_tickets_per_step: int | None = None
    """Tickets a step may start before it trains on fewer groups. Default 4 K."""
    min_answers: int = 2
    """A group with fewer scored answers does not qualify."""
    filter: FilterConfig = field(default_factory=FilterConfig)

    @property
    def answers_per_part(self) -> int:
        """`answers_per_ticket`, or the whole group where it is not given."""
        return self.answers_per_ticket or self.answers_per_prompt

    def __post_init__(self) -> None:
        one_of(self, claim=CLAIMS, accept=ACCEPTS, tail=TAILS)
        at_least(self, prompts_per_step=1, answers_per_prompt=1, max_prompt_tokens=1, max_new_tokens=1, min_answers=1)
        at_least(self, extra_prompts=0, max_tickets_per_step=self.prompts_per_step, answers_per_ticket=1)
        above(self, temperature=0)
        fits = self.answers_per_ticket is None or self.answers_per_ticket <= self.answers_per_prompt
        require(fits, f"answers_per_ticket: {self.answers_per_ticket} is more than answers_per_prompt")
        for key, off in (("top_k", -1), ("top_p", 1.0)):
            told = "training needs the logprob of every token under the full distribution, as the trainer computes it"
            require(getattr(self, key) == off, f"{key}: must be {off} (off), not {getattr(self, key)}: {told}")
        in_order = self.accept == "ticket" and self.tail == "none"
        require(
            self.claim == "store" or in_order, "claim: static deals in waves, which needs accept=ticket and tail=none"
        )
        require(
            not (self.carry and self.tail == "defer"), "carry: a deferred ticket starts again; choose carry or tail"
        )
        enough = self.min_answers <= self.answers_per_prompt
        require(enough, f"min_answers: {self.min_answers} is more than answers_per_prompt {self.answers_per_prompt}")


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    every: int = 10
    """Steps between evaluations; also before the first and after the last. 0: never."""
    prompts: int = 64
    """Held-out prompts used (all, if there are fewer)."""
    answers: int = 4
    """Sampled answers per prompt, beside one greedy answer."""
    temperature: float | None = None
    """Default: the rollout temperature."""

    def __post_init__(self) -> None:
        at_least(self, every=0, prompts=1, answers=1)
        above(self, temperature=0)
