"""`PictureRollouts`: prompts become pictures on the ranks that train, and pictures get their scores.

Micro-batches follow from the pictures' numbers alone, so each is computed alike on any number of ranks. All noise
follows from seeds of (step, prompt, picture). There is no state but the data's.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spmd_rl.algo.diffusion import NOISES, Gauss, log_density, sde_step, shifted, trained_steps
from spmd_rl.base.errors import RunFailed, UserError, tell
from spmd_rl.base.png import data_url, encode_png
from spmd_rl.base.targets import import_target
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.sections.pictures import DifferentiableConfig, DiffusionModelConfig
from spmd_rl.data import Prompts
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import World
from spmd_rl.model.diffusion import FlowModel, Given, build_flow_model
from spmd_rl.model.diffusion.tiny import build_tiny
from spmd_rl.train.denoising import Denoising
from spmd_rl.types import AnswerInfo, Prompt, Scorer, Verdict

Reward = Callable[[Tensor, Sequence[Prompt]], Tensor]
"""A reward with a gradient: pictures and prompts -> [B]"""
FOLDER = "pictures"


@dataclass(frozen=True)
class PictureBatch:
    """One micro-batch of pictures and their trajectories."""

    number: int
    """Number of the micro-batch in the step."""
    keys: list[tuple[int, int]]
    """Ticket and number of each picture."""
    prompts: list[Prompt]
    given: Given
    latents: Tensor
    """Latents before each sampling step and after the last, float32 [steps + 1, B, ...]."""
    logprobs: Mapping[int, Tensor]
    """Log densities of the steps with noise, [B] each, by step."""
    images: Tensor
    """Pictures in 0..1, float32 [B, (F,) 3, H, W], on the CPU."""
    is_spare: bool = False
    """True for a filler: the first micro-batch again, with weight 0."""
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(frozen=True)
class Gallery:
    """The pictures of a step: this rank's, and the scores of all ranks."""

    step: int
    levels: list[float]
    trained: range
    """Sampling steps with noise."""
    drawn: list[PictureBatch]
    """Micro-batches of this rank, equally many on all."""
    keys: list[tuple[int, int]]
    """Ticket and number of each scored picture."""
    scores: list[float]
    num_pictures: int

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the scores, equal on all ranks."""
        found = {"rollout/pictures": self.num_pictures, "rollout/error_share": 1 - len(self.keys) / self.num_pictures}
        if self.scores:
            found["critic/score/mean"] = sum(self.scores) / len(self.scores)
            found |= {"critic/score/max": max(self.scores), "critic/score/min": min(self.scores)}
        return found


class PictureRollouts:
    """Source of pictures by the newest policy. Stateful: a checkpoint has the prompts' position."""

    def __init__(
        self, cfg: RewardFlConfig, prompts: Prompts, flow: FlowModel, policy: Denoising, world: World, scorer: Scorer
    ) -> None:
        """scorer: of plain rewards; without these the differentiable one scores too."""
        self.prompts, self.flow, self.reward = prompts, flow, _reward(cfg.feedback.reward)
        self._cfg, self.policy, self._world, self._scorer = cfg, policy, world, scorer
        self.levels = shifted(cfg.pictures.steps, cfg.pictures.shift or flow.shift)
        self._runner = asyncio.Runner()

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return {"prompts": self.prompts.fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the prompts are others."""
        if state["prompts"] != self.prompts.fingerprint():
            raise UserError("data.train: the checkpoint is of other prompts")

    def collect(self, step: int) -> Gallery:
        """[all] Draw and score the pictures of a training step. RunFailed if too many get no score."""
        count, feedback = self._cfg.pictures.prompts_per_step, self._cfg.feedback
        tickets = range((step - 1) * count, step * count)
        asked = [(ticket, self.prompts.ticket(ticket, self._cfg.seed)[1]) for ticket in tickets]
        window, moves = feedback.window, (step - 1) // feedback.window_every if feedback.window_every else 0
        is_sde = feedback.loss == "grpo"
        trained = trained_steps(len(self.levels) - 1, window, moves) if is_sde else range(0)
        with self._world.phase("generate"):
            gallery = self._draw(step, asked, self._cfg.pictures.per_prompt, trained)  # [all]
        gallery = self._scored(gallery)  # [all]
        if not gallery.scores or 1 - len(gallery.scores) / gallery.num_pictures > self._cfg.reward.error_budget:
            # Equal on all ranks, which raise together.
            raise RunFailed(f"reward.error_budget: too many pictures of step {step} got no score")
        return gallery

    def held_out(self, step: int) -> Gallery | None:
        """[all] Draw and score pictures of held-out prompts if an evaluation is due; else return None."""
        eval = self._cfg.eval
        asked = list(enumerate(self.prompts.eval[: eval.prompts]))
        if not eval.is_due(step, self._cfg.steps) or not asked:
            return None
        with self._world.phase("eval"):
            # Of no step: the same noise in every evaluation.
            gallery = self._draw(0, asked, eval.per_prompt, range(0))  # [all]
            return self._scored(replace(gallery, step=step))  # [all]

    def paint(self, denoiser: nn.Module, latents: Tensor, given: Given, level: float) -> Tensor:
        """Return the velocity under guidance, float32, shaped like `latents`."""
        guidance = self._cfg.pictures.guidance
        if guidance == 1:
            return denoiser(latents, level, given)
        without, found = denoiser(torch.cat([latents, latents]), level, given).chunk(2)
        return without + guidance * (found - without)

    def step_of(self, latents: Tensor, velocity: Tensor, levels: Sequence[float], i: int) -> Gauss:
        """Return the distribution of the latents after sampling step `i`."""
        feedback = self._cfg.feedback
        return sde_step(
            latents, velocity, levels[i], levels[i + 1], NOISES[feedback.sde](levels[i], levels[1], feedback.noise)
        )

    def noise(self, step: int, keys: Sequence[tuple[int, int]], purpose: str) -> Tensor:
        """Return standard normal noise [B, ...] on the device, seeded for each key separately."""
        seeds = [counter_seed(self._cfg.seed, purpose, step, *key) for key in keys]
        drawn = [
            torch.randn(self.flow.latent_shape, generator=torch.Generator().manual_seed(seed >> 1)) for seed in seeds
        ]
        return torch.stack(drawn).to(self._world.device)

    # Drawing

    def _draw(self, step: int, asked: Sequence[tuple[int, Prompt]], per_prompt: int, trained: range) -> Gallery:
        """[all] Draw this rank's micro-batches; the first of all is a spare of ranks with fewer."""
        cfg, world = self._cfg, self._world
        every = [((ticket, number), prompt) for ticket, prompt in asked for number in range(per_prompt)]
        per = cfg.pictures.per_microbatch
        chunks = [every[begin : begin + per] for begin in range(0, len(every), per)]
        mine = [(number, chunks[number], False) for number in range(world.rank, len(chunks), world.size)]
        most = -(-len(chunks) // world.size)
        mine += [(0, chunks[0], True)] * (most - len(mine))
        levels = self.levels
        dtype = getattr(torch, cfg.policy.dtype)
        with self.flow.encoding(world.device, dtype):
            drafts = [self._begin(step, dtype, *one) for one in mine]
        with self.policy.awake():
            self.policy.compute("generate", drafts, lambda net, one: self._sample(net, one, step, levels, trained))
        with self.flow.decoding(world.device), torch.no_grad():
            decoded = [self.flow.decode(one.latents[-1]).clamp(0, 1).cpu() for one in drafts]
        drafts = [replace(one, images=images) for one, images in zip(drafts, decoded, strict=True)]
        return Gallery(step, levels, trained, drafts, [], [], len(every))

    def _begin(
        self, step: int, dtype: torch.dtype, number: int, chunk: list[tuple[tuple[int, int], Prompt]], is_spare: bool
    ) -> PictureBatch:
        keys, prompts = [key for key, _ in chunk], [prompt for _, prompt in chunk]
        texts = [prompt.messages[-1].text for prompt in prompts]
        texts = [""] * len(texts) + texts if self._cfg.pictures.guidance != 1 else texts
        given = self.flow.encode(texts, self._world.device, dtype)
        same = self._cfg.feedback.same_noise
        first = self.noise(step, [(ticket, 0) for ticket, _ in keys] if same else keys, "picture")
        latents = first.new_zeros(len(self.levels), *first.shape)
        latents[0] = first
        return PictureBatch(number, keys, prompts, given, latents, {}, torch.empty(0), is_spare)

    def _sample(self, net: nn.Module, one: PictureBatch, step: int, levels: list[float], trained: range) -> Tensor:
        for i in range(len(levels) - 1):
            velocity = self.paint(net, one.latents[i], one.given, levels[i])
            if i in trained:
                gauss = self.step_of(one.latents[i], velocity, levels, i)
                one.latents[i + 1] = gauss.mean + gauss.std * self.noise(step, one.keys, f"step {i}")
                one.logprobs[i] = log_density(one.latents[i + 1], gauss)
            else:
                one.latents[i + 1] = one.latents[i] + velocity * (levels[i + 1] - levels[i])
        return one.latents[-1]

    # Scoring

    def _scored(self, gallery: Gallery) -> Gallery:
        """[all] Return the pictures with their verdicts, and the scores of all ranks."""
        own = [one for one in gallery.drawn if not one.is_spare]
        with self._world.phase("score"):
            found = self._verdicts(own)
            drawn = [replace(one, verdicts=found.get(one.number, [])) for one in gallery.drawn]
            record = [
                [*key, verdict.score if verdict.scored else None, verdict.detail]
                for one in own
                for key, verdict in zip(one.keys, found[one.number], strict=True)
            ]
            everyone = sorted(row for rows in self._world.gather("score: pictures", record) for row in rows)  # [all]
        failed = [detail for *_, score, detail in everyone if score is None]
        if failed and self._world.rank == 0:
            tell(
                f"{len(failed)} of {len(everyone)} pictures of step {gallery.step} got no score; the first: {failed[0]}"
            )
        scored = [row for row in everyone if row[2] is not None]
        return replace(gallery, drawn=drawn, keys=[(a, b) for a, b, *_ in scored], scores=[row[2] for row in scored])

    def _verdicts(self, drawn: Sequence[PictureBatch]) -> dict[int, list[Verdict]]:
        """Return the verdicts by micro-batch: of the plain rewards, or without these of the differentiable one."""
        if not self._cfg.reward.domains:
            scored = ((one, self.reward(one.images.to(self._world.device), one.prompts)) for one in drawn)
            return {one.number: [_number(score) for score in scores.tolist()] for one, scores in scored}

        async def judge() -> list[list[Verdict]]:
            return await asyncio.gather(*(asyncio.gather(*self._judged(one)) for one in drawn))

        return {one.number: found for one, found in zip(drawn, self._runner.run(judge()), strict=True)}

    def _judged(self, one: PictureBatch) -> Iterator[Any]:
        for prompt, image in zip(one.prompts, one.images, strict=True):
            if image.isfinite().all():
                yield self._scorer.score(prompt, data_url(png_of(image)), AnswerInfo(0, "stop"))
            else:
                yield _spoiled()

    def save(self, gallery: Gallery, kind: str) -> dict[tuple[int, int], str]:
        """Write this rank's first pictures of a step; return their paths below the run directory, by key."""
        folder, found = Path(self._cfg.run.dir, FOLDER), {}
        chosen = [
            (key, image)
            for one in gallery.drawn
            if not one.is_spare
            for key, image in zip(one.keys, one.images, strict=True)
        ]
        for key, image in chosen[: -(-self._cfg.pictures.saved // self._world.size)]:
            folder.mkdir(exist_ok=True)
            ending, encoded = ("gif", gif_of) if image.dim() == 4 else ("png", png_of)
            path = folder / f"{kind}-{gallery.step:06d}-{key[0]}-{key[1]}.{ending}"
            path.write_bytes(encoded(image))
            found[key] = f"{FOLDER}/{path.name}"
        return found


def png_of(image: Tensor) -> bytes:
    """Return a picture, float [3, H, W] in 0..1, as PNG, a video, [F, 3, H, W], as an animated one."""
    frames = _pixels(image)
    return encode_png([frame.tobytes() for frame in frames], frames.shape[2], frames.shape[1])


def gif_of(video: Tensor) -> bytes:
    """Return the GIF of a video, float [F, 3, H, W] in 0..1, for people: it has 256 colours."""
    from PIL import Image

    first, *rest = map(Image.fromarray, _pixels(video))
    first.save(file := BytesIO(), "GIF", save_all=True, append_images=rest, duration=125, loop=0)
    return file.getvalue()


def _pixels(image: Tensor) -> np.ndarray:
    """Return the frames of a picture or a video, uint8 [F, H, W, 3]."""
    frames = image if image.dim() == 4 else image[None]
    return frames.nan_to_num().mul(255).round().byte().movedim(1, -1).contiguous().numpy()


def open_flow(cfg: RewardFlConfig, world: World) -> FlowModel:
    """[all] Return the diffusion model; build the embedded one first."""
    folder, sizes = Path(cfg.policy.model), (cfg.pictures.height, cfg.pictures.width, cfg.pictures.frames)
    if cfg.policy.model == str(Path(DiffusionModelConfig.model).expanduser()) and world.local_rank == 0:
        build_tiny(folder)
    world.barrier("start: the diffusion model is there")  # [all]
    return build_flow_model(folder, sizes)


def _reward(settings: DifferentiableConfig) -> Reward | None:
    if settings.target is None:
        return None
    return partial(import_target("feedback.reward.target", settings.target), **settings.args)


def _number(score: float) -> Verdict:
    is_finite = abs(score) < float("inf")
    return Verdict("ok", score) if is_finite else Verdict("error", detail=f"the reward is {score}")


async def _spoiled() -> Verdict:
    return Verdict("error", detail="its latent is not finite")
