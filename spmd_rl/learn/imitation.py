"""`Imitation`: a learner that makes demonstrations likelier, token by token, whatever they are worth."""

from dataclasses import replace

from spmd_rl.batch import Batch
from spmd_rl.config.schema import AgenticConfig, AlgorithmConfig
from spmd_rl.config.sections.algorithm import BoundsConfig
from spmd_rl.distributed import World
from spmd_rl.learn.learner import Learner
from spmd_rl.train.base import Metrics, TrainBackend

SUPERVISED = AlgorithmConfig(
    name="imitation",
    advantage="reinforce",
    loss="vanilla_pg",
    loss_agg="token-mean",
    reward_scale=0.0,
    reward_shift=1.0,
    bounds=BoundsConfig(max_abs_diff=None, min_ess=None),
)
"""Every score is 1 and so is every advantage: the policy gradient is that of supervised learning. No engine has sampled
the tokens, so nothing bounds how far its logprobs are from the trainer's."""


class Imitation(Learner):
    """One supervised step on the sampled tokens of what was collected, `-mean log pi(t)`."""

    def __init__(self, cfg: AgenticConfig, policy: TrainBackend, world: World) -> None:
        super().__init__(replace(cfg, algorithm=SUPERVISED), policy, None, None, world)
        self._lr_factor = (cfg.warmup.lr or cfg.policy.lr) / (cfg.policy.lr or 1.0)

    def update(self, batches: list[Batch]) -> Metrics:
        """[all] See `Learner.update`; the loss is the mean negative log-likelihood of a token, in nats."""
        self._policy.lr_factor = self._lr_factor
        metrics = super().update(batches)  # [all]
        self._policy.lr_factor = 1.0
        own = {"warmup/loss": metrics.pop("actor/pg_loss")} if "actor/pg_loss" in metrics else {}
        return own | {key: value for key, value in metrics.items() if not key.startswith(("train_infer/", "critic/"))}
