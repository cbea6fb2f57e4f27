"""What the tests of diffusion models share: a tiny model that is hardly trained, its settings, and its learner."""

from pathlib import Path

from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.load import load
from spmd_rl.data import Prompts
from spmd_rl.distributed import World
from spmd_rl.learn.feedback import Feedback
from spmd_rl.model.diffusion import build_flow_model
from spmd_rl.rollout.pictures import PictureRollouts
from spmd_rl.sidecar.local import LocalScorer
from spmd_rl.train import build_denoisers
from spmd_rl.train.denoising import denoiser_source
from spmd_rl.types import AnswerInfo, Prompt

SETTINGS = (
    "data.train=shapes:squares",
    "data.holdout=0.2",
    "feedback.reward.target=rewards.pictures:colour",
    "policy.dtype=float32",
    "policy.lr=1e-2",
    "policy.eps=1e-3",
    "policy.max_grad_norm=1e9",
    "pictures.steps=4",
    "pictures.prompts_per_step=3",
    "pictures.per_prompt=4",
    "pictures.per_microbatch=3",
)
LOSSES = {
    "refl": ("feedback=refl", "feedback.from_step=2"),
    "draft": ("feedback=draft",),
    "grpo": ("feedback=flow_grpo", "feedback.kl_coef=0.1", "feedback.clip=0.2", "train.updates_per_step=2"),
    "lora": ("feedback=dance_grpo", "feedback.kl_coef=0.1", "policy.lora.rank=4"),
    "nft": ("feedback=nft", "pictures.guidance=2"),
}


def settings(model: Path | str, *more: str) -> RewardFlConfig:
    """Settings of a small run."""
    return load("reward_fl", RewardFlConfig, [*SETTINGS, f"policy.model={model}", *more])


def learner(cfg: RewardFlConfig, world: World) -> tuple[PictureRollouts, Feedback]:
    """[all] The rollouts and the learner of `cfg`, without sidecars."""
    flow = build_flow_model(Path(cfg.policy.model))
    roles = build_denoisers(cfg.denoisers, world, denoiser_source(flow))
    rollouts = PictureRollouts(cfg, Prompts.load(cfg.data), flow, roles.policy, world, LocalScorer(cfg.reward))
    return rollouts, Feedback(cfg, rollouts, roles, world)


class FailsForOne:
    """A rewarder that raises for the prompts of one colour."""

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> float:
        """Score a picture by its size."""
        if "red" in prompt.ground_truth:
            raise ValueError("no red here")
        return -float(len(answer))
