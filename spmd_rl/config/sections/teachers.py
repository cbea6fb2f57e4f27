"""Teachers and the loss of distillation: `teacher`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.sections.models import PARTIAL_TRAIN, ModelConfig
from spmd_rl.config.values import at_least, one_of, require
from spmd_rl.types import unknown_fields

DIVERGENCES = ("forward_kl", "reverse_kl", "skewed_kl", "skewed_reverse_kl", "jensen_shannon")


@dataclass
class TeacherConfig(ModelConfig):
    """A frozen model that the policy learns from; `teacher.<domain>` for one domain."""

    train: dict[str, Any] = field(default_factory=dict, metadata=PARTIAL_TRAIN)
    """Keys of `train` that differ for this role, such as `tp=2`; not `updates_per_step`."""
    hint: str | None = None
    """Text after the teacher's prompt that the policy does not see: `"The answer is {answer}."`, with the row's answer.
    Without a `model`, the policy with this hint is its own teacher (`rlvr` alone)."""


@dataclass
class TeachersConfig(TeacherConfig):
    """Distillation from frozen teachers, which share the policy's vocabulary; only with a `model`, that of a domain, or
    a hint."""

    only: bool = True
    """Learn from the teacher alone; scores are only measured. `false`: add its part to the algorithm's loss."""
    coef: float = 1.0
    """Weight of the divergence between teacher and policy in each token's loss."""
    loss: str = "reverse_kl"
    """Divergence: `forward_kl`, `reverse_kl`, `skewed_kl`, `skewed_reverse_kl` or `jensen_shannon`, over the teacher's
    `top_k` tokens and the others as one."""
    top_k: int = 64
    """Teacher's most likely tokens sent per sampled token."""
    mix: float = 0.1
    """Mixture share of the skewed divergences; teacher's weight in `jensen_shannon`."""
    reward_coef: float = 0.0
    """Weight of the teacher's logprob minus the policy's as an advantage of each sampled token: policy gradient instead
    of, or besides (`coef`), a loss."""
    domains: dict[str, TeacherConfig] = field(default_factory=dict, metadata={"inline": True})
    """Teachers of single domains instead of `teacher.model`: `teacher.<domain>.*`."""

    @property
    def by_domain(self) -> dict[str, TeacherConfig]:
        """Sections of existing teachers by domain; '' is all other domains."""
        return {domain: one for domain, one in ({"": self} | self.domains).items() if one.model or one.hint}

    @property
    def sections(self) -> dict[str, TeacherConfig]:
        """Sections of teachers with a separate model, by role: `teacher`, `teacher.<domain>`."""
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
