"""`Feedback`: a step of learning from the rewards of pictures.

An update is a list of items, each one forward and backward: a micro-batch of pictures with a sampling step (`grpo`), a
noise level (`nft`), or the first step with a gradient (`refl`, `draft`). Pictures weigh the same in every layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.algo import ADVANTAGES, diffusion
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.shaping import clip
from spmd_rl.base.errors import tell
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.sections.pictures import DIFFERENTIABLE
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import World
from spmd_rl.learn.custom import bind
from spmd_rl.learn.losses import mean_over
from spmd_rl.learn.sample_log import verdict_row
from spmd_rl.rollout.pictures import Gallery, PictureBatch, PictureRollouts
from spmd_rl.track.samples import SampleRow, TurnRow
from spmd_rl.train import Roles
from spmd_rl.train.base import Metrics
from spmd_rl.train.denoising import Denoising


@dataclass(frozen=True)
class Item:
    """One forward and backward of an update."""

    drawn: PictureBatch
    place: int
    """Sampling step (`refl`, `draft`: the first with a gradient); with `nft` the index of a noise level."""
    weights: Tensor
    """float32 [B]: share in the loss; 0 for spares and unscored pictures."""
    advantages: Tensor
    """float32 [B]"""
    reference: Tensor | None = None
    """[B, ...]: velocity of the reference; None without a KL."""
    old: Tensor | None = None
    """[B, ...]: velocity of the policy before the step's first update (`nft`)."""


Log = Callable[[int, Iterable[SampleRow]], None]
HELD_OUT = {"val/score/mean": "critic/score/mean", "val/error_share": "rollout/error_share"}


class Feedback:
    """The learner of diffusion models: advantages, updates, held-out scores."""

    def __init__(self, cfg: RewardFlConfig, rollouts: PictureRollouts, roles: Roles, world: World) -> None:
        self._cfg, self._rollouts, self._world = cfg, rollouts, world
        self._policy: Denoising = roles.policy
        self._reference: Denoising | None = roles.reference
        self._advantage = bind(ADVANTAGES[cfg.feedback.advantage], cfg.feedback)
        losses = {"grpo": self._grpo, "nft": self._nft, "refl": self._through, "draft": self._through}
        self._loss: Callable[[nn.Module, Item], tuple[Tensor, Mapping[str, Any]]] = losses[cfg.feedback.loss]
        self.gallery: Gallery | None = None
        self._advantages: dict[tuple[int, int], float] = {}

    def prepare(self, gallery: Gallery) -> list[list[Item]]:
        """[all] Return the items of each update, equally many on every rank, with the velocities of frozen policies."""
        self.gallery = gallery
        tickets = torch.tensor([ticket for ticket, _ in gallery.keys])
        scored = Scored(torch.tensor(gallery.scores, dtype=torch.float64), tickets, torch.ones_like(tickets))
        advantages = clip(self._advantage(scored), self._cfg.feedback.advantage_clip)
        self._advantages = dict(zip(gallery.keys, advantages.tolist(), strict=True))
        with self._world.phase("prepare"):
            updates = [self._items(number) for number in range(self._cfg.train.updates_per_step)]
            if self._reference is not None:
                updates = [self._frozen("reference", self._reference, items) for items in updates]  # [all]
            if self._cfg.feedback.loss == "nft":
                updates = [self._frozen("old", self._policy, items) for items in updates]  # [all]
        return updates

    def update(self, updates: list[list[Item]]) -> Metrics:
        """[all] Update the policy; return means over updates."""
        flow, needs_decoder = self._rollouts.flow, self._cfg.feedback.loss in DIFFERENTIABLE
        with self._world.phase("update"), self._policy.awake():
            with flow.decoding(self._world.device) if needs_decoder else nullcontext():
                metrics = mean_over([self._policy.update(items, self._loss) for items in updates], "actor")  # [all]
        if metrics["actor/skipped"] and self._world.rank == 0:
            tell(f"step {self.gallery.step}: a gradient was not finite; its update is skipped")
        return metrics

    def evaluate(self, step: int, log: Log) -> Metrics:
        """[all] If an evaluation is due, draw and log held-out pictures and return their metrics."""
        gallery = self._rollouts.held_out(step)  # [all]
        if gallery is None:
            return {}
        log(step, self.rows(gallery, "eval"))
        found = gallery.metrics()
        return {name: found[key] for name, key in HELD_OUT.items() if key in found}

    # Items

    def _items(self, number: int) -> list[Item]:
        gallery, size, count = self.gallery, self._world.size, self._cfg.train.updates_per_step
        total = -(-gallery.num_pictures // self._cfg.pictures.per_microbatch)
        members = range(number * total // count, (number + 1) * total // count)
        mine = [one for one in gallery.drawn if one.number in members and not one.is_spare]
        most = max(sum(n % size == rank for n in members) for rank in range(size))
        mine += [replace(gallery.drawn[0], is_spare=True)] * (most - len(mine))
        counted = self._counted(members)
        return [item for one in mine for item in self._of_drawn(one, counted)]

    def _counted(self, members: range) -> int:
        per, gallery = self._cfg.pictures.per_microbatch, self.gallery
        if self._cfg.feedback.loss in DIFFERENTIABLE:
            return sum(min(per, gallery.num_pictures - number * per) for number in members)
        each = self._cfg.pictures.per_prompt
        first = (gallery.step - 1) * self._cfg.pictures.prompts_per_step
        return sum(((ticket - first) * each + picture) // per in members for ticket, picture in gallery.keys)

    def _of_drawn(self, one: PictureBatch, counted: int) -> Iterator[Item]:
        feedback, steps = self._cfg.feedback, len(self.gallery.levels) - 1
        places: Iterable[int] = self.gallery.trained
        if feedback.loss == "nft":
            places = range(min(feedback.levels, steps))
        elif feedback.loss == "draft":
            places = [steps - feedback.last_steps]
        elif feedback.loss == "refl":
            # All ranks take the same sampling step: a model with one network per range of noise then needs one of them.
            places = [
                feedback.from_step
                + counter_seed(self._cfg.seed, "refl", self.gallery.step) % (steps - feedback.from_step)
            ]
        places = list(places)
        counts = [feedback.loss in DIFFERENTIABLE or key in self._advantages for key in one.keys]
        weights = torch.tensor(counts, dtype=torch.float32) * (not one.is_spare) / max(1, counted * len(places))
        advantages = torch.tensor([self._advantages.get(key, 0.0) for key in one.keys])
        device = self._world.device
        return (Item(one, place, weights.to(device), advantages.to(device)) for place in places)

    def _frozen(self, name: str, role: Any, items: list[Item]) -> list[Item]:
        """[all] Return items with a role's velocities in field `name`."""
        with role.awake():
            found = role.compute(
                f"prepare: {name}", items, lambda net, item: self._rollouts.paint(net, *self._at(item))
            )  # [all]
        return [replace(item, **{name: velocity}) for item, velocity in zip(items, found, strict=True)]

    def _at(self, item: Item) -> tuple[Tensor, dict[str, Tensor], float]:
        one, levels = item.drawn, self.gallery.levels
        if self._cfg.feedback.loss == "grpo":
            return one.latents[item.place], one.given, levels[item.place]
        level = levels[item.place * (len(levels) - 1) // min(self._cfg.feedback.levels, len(levels) - 1)]
        return diffusion.noised(one.latents[-1], self._noise(item), level), one.given, level

    def _noise(self, item: Item) -> Tensor:
        return self._rollouts.noise(self.gallery.step, item.drawn.keys, f"nft {item.place}")

    # Losses

    def _grpo(self, net: nn.Module, item: Item) -> tuple[Tensor, Mapping[str, Any]]:
        feedback, levels, i = self._cfg.feedback, self.gallery.levels, item.place
        latents, after = item.drawn.latents[i], item.drawn.latents[i + 1]
        step = self._rollouts.step_of(latents, self._rollouts.paint(net, *self._at(item)), levels, i)
        logprobs = diffusion.log_density(after, step)
        losses, metrics = bind(diffusion.flow_grpo, feedback)(logprobs, item.drawn.logprobs[i], item.advantages)
        if item.reference is not None:
            kl = diffusion.step_kl(step, self._rollouts.step_of(latents, item.reference, levels, i))
            losses, metrics = losses + feedback.kl_coef * kl, {**metrics, "actor/kl": kl.detach()}
        return _summed(losses, item.weights, metrics)

    def _nft(self, net: nn.Module, item: Item) -> tuple[Tensor, Mapping[str, Any]]:
        feedback = self._cfg.feedback
        velocity = self._rollouts.paint(net, *self._at(item))
        target = self._noise(item) - item.drawn.latents[-1]
        good = diffusion.goodness(item.advantages, feedback.advantage_clip)
        losses = bind(diffusion.nft, feedback)(velocity, item.old, target, good)
        metrics = {"actor/goodness": good}
        if item.reference is not None:
            kl = (velocity - item.reference).square().flatten(1).mean(1)
            losses, metrics = losses + feedback.kl_coef * kl, {**metrics, "actor/kl": kl.detach()}
        return _summed(losses, item.weights, metrics)

    def _through(self, net: nn.Module, item: Item) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the negative reward, with the gradient through the last sampling steps or one predicted picture."""
        one, levels, latents = item.drawn, self.gallery.levels, item.drawn.latents[item.place]
        ends = [0.0] if self._cfg.feedback.loss == "refl" else levels[item.place + 1 :]
        for level, after in zip(levels[item.place :], ends, strict=False):
            latents = latents + self._rollouts.paint(net, latents, one.given, level) * (after - level)
        images = self._rollouts.flow.decode(latents, self._cfg.feedback.reward.frames)
        rewards = self._rollouts.reward(images, one.prompts)
        return _summed(-rewards, item.weights, {"feedback/reward": rewards.detach()})

    # The log

    def rows(self, gallery: Gallery, kind: str = "step") -> Iterator[SampleRow]:
        """Save some of this rank's pictures; yield a row of the sample log for each, with its path as the answer."""
        paths, held_out = self._rollouts.save(gallery, kind), kind == "eval"
        for one in gallery.drawn:
            for key, prompt, verdict in zip(one.keys, one.prompts, one.verdicts, strict=False):
                if key in paths and not one.is_spare:
                    advantage = None if held_out else self._advantages.get(key)
                    reason = "held out" if held_out else None if verdict.scored else "no score"
                    turns = [TurnRow(paths[key], [], [], [], [], "stop")]
                    asked = prompt.id, prompt.domain, prompt.messages, prompt.ground_truth
                    yield SampleRow(*key, *asked, turns, verdict_row(verdict), advantage, reason is None, reason)


def _summed(losses: Tensor, weights: Tensor, metrics: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    counts = weights > 0
    sums = {name: (values * counts).sum() for name, values in metrics.items()}
    return (losses * weights).sum(), {**sums, "num_tokens": counts.sum()}
