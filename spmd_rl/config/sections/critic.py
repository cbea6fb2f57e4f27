"""The critic of PPO and its optimizer: `critic`."""

from dataclasses import dataclass, field
from os.path import expanduser

from spmd_rl.config.sections.models import TrainOverrides, check_trained


@dataclass
class CriticConfig:
    """The model that learns to foresee scores, and its optimizer (AdamW); only `algorithm.advantage=gae` trains one."""

    model: str | None = None
    """Its start, a Hugging Face causal LM directory whose head is replaced by a value. Default: the policy's."""
    dtype: str | None = None
    """Compute dtype. Default: the policy's."""
    lr: float = 5e-5
    """Peak learning rate."""
    schedule: str = "constant"
    """`constant`, `linear` or `cosine` decay to 0 at `steps`, after the warm-up."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's moment decays."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    max_skipped_updates: int = 3
    """So many non-finite gradients in a row stop the run."""
    train: TrainOverrides = field(default_factory=TrainOverrides)

    def __post_init__(self) -> None:
        self.model = self.model and expanduser(self.model)
        check_trained(self)
