"""Teachers of the policy and the loss of distillation: `teacher`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.sections.models import PARTIAL_TRAIN, ModelConfig
from spmd_rl.config.values import at_least, one_of, require
from spmd_rl.types import unknown_fields

DIVERGENCES = ("forward_kl", "reverse_kl", "skewed_kl", "skewed_reverse_kl", "jensen_shannon")
"""Divergences of `algo/distillation.py`, by name."""


@dataclass
class TeacherConfig(ModelConfig):
    """A frozen model that the policy learns from: of one domain in `teacher.<domain>`."""

    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; all but `updates_per_step`."""
    hint: str | None = None
    """Text added to the teacher's prompt, after an empty line, which the policy does not see: `"The answer is
    {answer}."`, in which `{answer}` is the row's. Without a `model`, the teacher is the policy itself with this hint
    (`rlvr` alone).
    """


@dataclass
class TeachersConfig(TeacherConfig):
    """Distillation: the teachers, held in their compute dtype, and the policy's loss against them; only with
    `teacher.model`, that of a domain, or a hint. Its vocabulary must be the policy's.
    """

    only: bool = True
    """Learn from the teacher alone; scores are measured and have no part in the gradient. `false`: the teacher's part
    is added to the algorithm's loss on the scores.
    """
    coef: float = 1.0
    """Weight, in the loss of each token, of the divergence between teacher and policy. 0: none."""
    loss: str = "reverse_kl"
    """Divergence between teacher and policy: `forward_kl`, `reverse_kl`, `skewed_kl`, `skewed_reverse_kl` or
    `jensen_shannon`, over the teacher's `top_k` tokens and all others as one.
    """
    top_k: int = 64
    """Number of the teacher's most likely tokens that it sends for each sampled token."""
    mix: float = 0.1
    """Share of the mixture that the skewed divergences compare with, and weight of the teacher in `jensen_shannon`."""
    reward_coef: float = 0.0
    """Weight of the teacher's logprob over the policy's, as an advantage of each sampled token: policy gradient instead
    of a loss. Then `coef=0`, or both.
    """
    domains: dict[str, TeacherConfig] = field(default_factory=dict, metadata={"inline": True})
    """Teachers for the answers of one domain, instead of `teacher.model`: `teacher.<domain>.*`."""

    @property
    def by_domain(self) -> dict[str, TeacherConfig]:
        """Section of each existing teacher by domain; '' is that of all other domains."""
        return {domain: one for domain, one in ({"": self} | self.domains).items() if one.model or one.hint}

    @property
    def sections(self) -> dict[str, TeacherConfig]:
        """Section of each teacher with a separate model, by the name of its role: `teacher`, `teacher.<domain>`."""
        found = {f"teacher.{domain}".rstrip("."): one for domain, one in self.by_domain.items()}
        return {name: one for name, one in found.items() if one.model}

    @property
    def hints(self) -> dict[str, str | None]:
        """Hint of each teacher; empty without any hint."""
        found = {domain: one.hint for domain, one in self.by_domain.items()}
        return found if any(found.values()) else {}

    def __post_init__(self) -> None:
        super().__post_init__()
        for domain, hint in self.hints.items():
            odd = unknown_fields(hint or "", ["answer"])
            require(not odd, f"{domain}.hint: unknown field {', '.join(odd)}; known: {{answer}}".lstrip("."))
        one_of(self, loss=DIVERGENCES)
        at_least(self, coef=0, top_k=1, reward_coef=0)
        require(0 < self.mix < 1, f"mix: must be between 0 and 1, not {self.mix:g}")
        require(
            bool(self.coef or self.reward_coef),
            "coef: is 0, as is reward_coef, so there is nothing to learn; set one above 0",
        )
