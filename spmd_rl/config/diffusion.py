"""The settings of `python -m spmd_rl.reward_fl`; see `schema`."""

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import import_target
from spmd_rl.config.schema import PipelineConfig
from spmd_rl.config.sections.data import RewardsConfig
from spmd_rl.config.sections.models import ReferenceConfig, RoleConfig
from spmd_rl.config.sections.pictures import (
    DIFFERENTIABLE,
    DiffusionModelConfig,
    FeedbackConfig,
    PicturePromptsConfig,
    PicturesConfig,
    PicturesEvalConfig,
)
from spmd_rl.config.sections.run import PlanConfig, SidecarConfig
from spmd_rl.config.values import require

REWARDS = "say reward.<domain>.target=module:Class or feedback.reward.target=module:function (docs/DIFFUSION.md)"


@dataclass
class RewardFlConfig(PipelineConfig):
    """The settings of reward feedback for diffusion models."""

    pipeline = "reward_fl"
    policy: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    data: PicturePromptsConfig = field(default_factory=PicturePromptsConfig)
    pictures: PicturesConfig = field(default_factory=PicturesConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    reward: RewardsConfig = field(default_factory=RewardsConfig)
    eval: PicturesEvalConfig = field(default_factory=PicturesEvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, feedback, train = self.pictures.steps, self.feedback, self.train
        require(train.name == "fsdp2", f"train.name: {train.name} trains no diffusion models; must be fsdp2")
        for axis in ("tp", "cp", "ep", "pp", "vpp"):
            require(
                train.axes.get(axis, train.vpp) == 1, f"train.{axis}: a diffusion model has no such axis; must be 1"
            )
        pictures = self.pictures.prompts_per_step * self.pictures.per_prompt
        count = -(-pictures // self.pictures.per_microbatch)
        require(
            train.updates_per_step <= count,
            f"train.updates_per_step: {train.updates_per_step} of only {count} micro-batches, as "
            f"pictures.per_microbatch={self.pictures.per_microbatch}",
        )
        if self.data.train and feedback.reward.target is None:
            line = f"loss={feedback.loss} follows the gradient of a reward; name one as module:function"
            require(feedback.loss not in DIFFERENTIABLE, f"feedback.reward.target: {line}")
            require(bool(self.reward.domains), f"reward: nothing scores pictures; {REWARDS}")
        needless = feedback.reward.frames and not self.pictures.frames
        require(not needless, "feedback.reward.frames: is for videos; set pictures.frames, or leave it out")
        for key, most in (("last_steps", steps), ("from_step", steps - 1)):
            used = feedback.loss == {"last_steps": "draft", "from_step": "refl"}[key]
            found = getattr(feedback, key)
            require(not used or found <= most, f"feedback.{key}: {found} of only pictures.steps={steps} sampling steps")

    @property
    def kind(self) -> str:
        """Part of a run's default name: the loss."""
        return self.feedback.loss

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of language models: none. Those of the diffusion model are `denoisers`."""
        return []

    @property
    def denoisers(self) -> list[RoleConfig]:
        """Settings of the policy, and of its frozen reference if the loss compares with it."""
        reference = [self.role("reference", ReferenceConfig())] if self.feedback.uses_reference else []
        return [replace(role, is_denoiser=True) for role in (self.role("policy"), *reference)]


def check_diffusion(policy: DiffusionModelConfig, feedback: FeedbackConfig) -> None:
    """Check that the model is there, with the packages that it needs; and that the differentiable reward can be
    imported."""
    folder = Path(policy.model)
    is_embedded = policy.model == DiffusionModelConfig().model
    if not is_embedded and not any((folder / name).is_file() for name in ("model_index.json", "config.json")):
        raise UserError(
            f"policy.model: {folder} holds no diffusion model; `hf download ORG/NAME --local-dir DIR` fetches one"
        )
    if (index := folder / "model_index.json").is_file():
        if importlib.util.find_spec("diffusers") is None:
            raise UserError("policy.model: diffusers is not installed here; pip install 'spmd-rl[diffusion]'")
        for name in (name for name in ("transformer", "transformer_2", "vae") if name in json.loads(index.read_text())):
            if (folder / name).is_dir() and not any((folder / name).glob("*.safetensors")):
                raise UserError(f"policy.model: {folder / name} has no weights (*.safetensors); download it again")
    if policy.lora.rank and importlib.util.find_spec("peft") is None:
        raise UserError("policy.lora.rank: peft is not installed here; pip install 'spmd-rl[lora]'")
    # Last, since it may import torch.
    if feedback.reward.target is not None:
        import_target("feedback.reward.target", feedback.reward.target)
