"""Shows what a run of reward feedback would do: its arithmetic, three prompts, and what would be written.

    python -m spmd_rl dry_run reward_fl +experiment=demo_reward_fl

Nothing is written, no weights are loaded, and torch is not imported.
"""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from spmd_rl import sidecar
from spmd_rl.base.errors import printable
from spmd_rl.base.waits import phase
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.model_files import describe_model
from spmd_rl.config.ranks import world_size
from spmd_rl.config.sections.pictures import DIFFERENTIABLE
from spmd_rl.data import Prompts
from spmd_rl.tools.dry_run import SHOWN, dtype, outputs, table


def show(cfg: RewardFlConfig) -> None:
    """Print the preview of a run. UserError for mistakes that would end it before its first step."""
    with phase("reading the prompts"):
        prompts = Prompts.load(cfg.data)
    if cfg.reward.domains:
        sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)
    pictures, feedback, folder = cfg.pictures, cfg.feedback, Path(cfg.policy.model)
    count = pictures.prompts_per_step * pictures.per_prompt
    batches = -(-count // pictures.per_microbatch)
    passes = 2 if pictures.guidance != 1 else 1
    lines = [
        ("model", f"{folder}: {describe_model(folder) if folder.is_dir() else 'is trained by the first run'}"),
        ("dtype", f"{dtype(cfg.policy.dtype)}; master weights and optimizer float32"),
        ("ranks", f"{world_size()}: each draws, scores and trains pictures"),
        ("prompts", f"{len(prompts.train)} for training, {len(prompts.eval)} held out"),
        ("a step", f"{pictures.prompts_per_step} prompts x {pictures.per_prompt} = {count} pictures in {batches} "
                   f"micro-batches, {-(-batches // world_size())} a rank; {cfg.train.updates_per_step} updates"),
        ("a picture", f"{pictures.steps * passes} forward passes, guidance {pictures.guidance:g}"),
        ("feedback", f"{feedback.loss}: {_trained(cfg)}"),
        ("rewards", ", ".join([*cfg.reward.domains, *filter(None, [feedback.reward.target])])),
        ("optimizer", f"lr {cfg.policy.lr:g}, {cfg.policy.schedule}, LoRA of rank {cfg.policy.lora.rank}"),
    ]  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table(console, "Batch arithmetic", [line for line in lines if line[1]])
    for prompt in prompts.train[:SHOWN]:
        text = f"{prompt.messages[-1].text}  ({prompt.domain}: {prompt.ground_truth})"
        console.print(Text(printable(text)))
    table(console, "Would be written", [*outputs(cfg), ("pictures", f"{pictures.saved} of each step, as PNG")])


def _trained(cfg: RewardFlConfig) -> str:
    feedback, steps = cfg.feedback, cfg.pictures.steps
    if feedback.loss in DIFFERENTIABLE:
        last = feedback.last_steps if feedback.loss == "draft" else 1
        return f"the gradient of {feedback.reward.target} through {last} of {steps} sampling steps"
    if feedback.loss == "nft":
        return f"{min(feedback.levels, steps)} noise levels of each picture"
    return f"{min(feedback.window or steps, steps - 1)} of {steps} sampling steps with {feedback.sde} noise"
