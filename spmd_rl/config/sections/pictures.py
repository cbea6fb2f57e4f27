"""Pictures and learning from their rewards: `pictures`, `feedback`, `eval` and `data` of `reward_fl`."""

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.sections.data import NO_DATA, DataConfig
from spmd_rl.config.sections.models import PolicyConfig
from spmd_rl.config.values import above, at_least, one_of

LOSSES = ("refl", "draft", "grpo", "nft")
DIFFERENTIABLE = ("refl", "draft")
"""Losses that need the gradient of a reward"""
NOISES = ("flow", "constant")
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce")
"""Estimators of `algo.advantages` that need scores and groups alone"""


@dataclass
class PicturePromptsConfig(DataConfig):
    """The prompts of pictures: `data`. `shapes:squares` are those of the embedded model."""

    no_data = NO_DATA.format(
        what="to draw",
        demo="demo_reward_fl",
        rows="prompts",
        line="data.train=rows.jsonl reward.<domain>.target=module:Class",
        page="DIFFUSION.md",
    )
    needs_rewarder = False


@dataclass
class DiffusionModelConfig(PolicyConfig):
    """The diffusion model, whose transformer is trained."""

    model: str = "~/.cache/spmd_rl/models/tiny-flow"
    """The embedded tiny model, which the first run builds in a minute; or a pipeline of diffusers on disk
    (`StableDiffusion3Pipeline`, `WanPipeline`), as `hf download` and `save_pretrained` write it."""


@dataclass
class PicturesConfig:
    """Sampling of pictures: `pictures`."""

    prompts_per_step: int = 8
    """Prompts of a training step."""
    per_prompt: int = 8
    """Pictures of each prompt, which are compared with each other."""
    per_microbatch: int = 16
    """Pictures of one forward pass, in sampling and training."""
    steps: int = 10
    """Sampling steps from noise to picture."""
    guidance: float = 1.0
    """Scale of classifier-free guidance, in sampling and in training; 1: none."""
    height: int | None = None
    """Height in pixels; null: the model's own."""
    width: int | None = None
    """Width in pixels; null: the model's own."""
    frames: int | None = None
    """Frames of a video; null: the model's own."""
    shift: float | None = None
    """Shift of the noise levels towards noise; null: the model's own."""
    saved: int = 8
    """Pictures of a step or an evaluation that are written to `run.dir/pictures`."""

    def __post_init__(self) -> None:
        at_least(self, prompts_per_step=1, per_prompt=1, per_microbatch=1, steps=2, guidance=1, saved=0)
        at_least(self, height=8, width=8, frames=1)
        above(self, shift=0)


@dataclass
class DifferentiableConfig:
    """A reward with a gradient, computed on the ranks' devices: `feedback.reward`."""

    target: str | None = None
    """`module:function` of pictures (float [B, 3, H, W] in 0..1, of a video [B, F, 3, H, W]) and prompts that returns
    rewards [B]."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of each call."""
    frames: int | None = None
    """First frames of a video decoded for it in an update; null: all. A decoder's gradient needs some GB for each."""

    def __post_init__(self) -> None:
        at_least(self, frames=1)


@dataclass
class FeedbackConfig:
    """Learning from the rewards of pictures: group `feedback`."""

    loss: str = "grpo"
    """`refl` and `draft` follow the gradient of `feedback.reward`; `grpo` (Flow-GRPO, DanceGRPO) and `nft`
    (DiffusionNFT) learn from any score: docs/DIFFUSION.md."""
    reward: DifferentiableConfig = field(default_factory=DifferentiableConfig)
    last_steps: int = 2
    """K of DRaFT-K (`draft`): last sampling steps through which the gradient flows."""
    from_step: int = 5
    """First sampling step, from 0, at which ReFL (`refl`) may stop and predict the picture, at random."""
    sde: str = "flow"
    """Noise of the sampling steps (`grpo`): `flow` as in Flow-GRPO, `constant` as in DanceGRPO."""
    noise: float = 0.7
    """Size of that noise."""
    window: int | None = None
    """Sampling steps with noise, which are trained (`grpo`, MixGRPO); null: all but the last."""
    window_every: int | None = None
    """Training steps after which the window moves; null: it stays at the first sampling steps."""
    same_noise: bool = False
    """Begin all pictures of a prompt from the same noise, as DanceGRPO does."""
    clip: float = 1e-4
    """Bound of the ratio of `grpo`: within 1 - clip and 1 + clip."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model (`grpo`), or of the squared distance of velocities (`nft`)."""
    advantage: str = "grpo"
    """Estimator of advantages: `grpo`, `dr_grpo`, `rloo` or `reinforce`."""
    norm_std: bool = True
    """Divide advantages by the standard deviation of the group (`advantage=grpo`)."""
    advantage_clip: float = 5.0
    """Bound of the size of an advantage."""
    beta: float = 1.0
    """Strength of the mirror at the old policy (`nft`)."""
    levels: int = 4
    """Noise levels at which each picture is trained (`nft`), spread over the sampling steps."""

    def __post_init__(self) -> None:
        one_of(self, loss=LOSSES, sde=NOISES, advantage=ADVANTAGES)
        at_least(self, last_steps=1, from_step=0, window=1, window_every=1, kl_coef=0, levels=1)
        above(self, noise=0, clip=0, advantage_clip=0, beta=0)

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with the initial model."""
        return self.kl_coef > 0 and self.loss not in DIFFERENTIABLE


@dataclass
class PicturesEvalConfig:
    """Pictures of held-out prompts, by the ODE: `eval`."""

    every: int = 10
    """Steps between evaluations; one is before the first step and one after the last. 0: none."""
    prompts: int = 16
    """Largest number of held-out prompts."""
    per_prompt: int = 4
    """Pictures of each, from the same noise each time."""

    def __post_init__(self) -> None:
        at_least(self, every=0, prompts=1, per_prompt=1)

    def is_due(self, step: int, steps: int) -> bool:
        """Return True if there is an evaluation after `step` of `steps`."""
        return bool(self.every) and (step % self.every == 0 or step == steps)
