"""Divergences between a teacher's and a student's next-token distribution, over k tokens and all others as one.

The rest of the vocabulary is one more outcome, so each divergence is a lower bound of that over the whole vocabulary.
Gradients flow to the student alone, and not through the choice of tokens (GKD, Agarwal et al., arXiv 2306.13649).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SMALLEST = 1e-6
"""Floor of the rest's probability: float32 sums resolve no less."""


def with_rest(logprobs: Tensor) -> Tensor:
    """Append the logprob of all other tokens: [N, k] -> [N, k + 1], in nats."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST)
    return torch.cat([logprobs, rest.log()], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each row, sum p (log p - log q); from logprobs [N, n]."""
    return (p.exp() * (p - q)).sum(-1)


def mixed(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Return logprobs of the mixture share p + (1 - share) q, of logprobs [N, n]; 0 < share < 1."""
    shares = p.new_tensor([share, 1 - share]).log()
    return torch.logaddexp(p + shares[0], q + shares[1])


def forward_kl(teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """KL(teacher || student): the student covers the teacher."""
    return kl(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """KL(student || teacher): the student stays where the teacher is likely."""
    return kl(student, teacher)


def skewed_kl(teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """KL(teacher || mix teacher + (1 - mix) student), whose gradient is bounded (DistiLLM, arXiv 2402.03898)."""
    return kl(teacher, mixed(teacher, student, mix))


def skewed_reverse_kl(teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """KL(student || mix student + (1 - mix) teacher) (DistiLLM, arXiv 2402.03898)."""
    return kl(student, mixed(student, teacher, mix))


def jensen_shannon(teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """mix KL(teacher || m) + (1 - mix) KL(student || m), m = mix teacher + (1 - mix) student (GKD)."""
    middle = mixed(teacher, student, mix)
    return mix * kl(teacher, middle) + (1 - mix) * kl(student, middle)


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    function.__name__: function for function in (forward_kl, reverse_kl, skewed_kl, skewed_reverse_kl, jensen_shannon)
}


def distillation(name: str, teacher: Tensor, student: Tensor, mix: float) -> Tensor:
    """Return the divergence `name` of each token, float32 [N], from logprobs of the same k tokens, [N, k] each.

    Rows without a teacher (-inf), or with k = 0, give 0 and no gradient.
    """
    known = teacher.isfinite().all(-1, keepdim=True)
    flat = torch.full_like(teacher, -20.0)
    both = (with_rest(torch.where(known, some, flat)) for some in (teacher, student))
    return torch.where(known[:, 0], DIVERGENCES[name](*both, mix), 0.0)
