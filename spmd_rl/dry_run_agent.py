"""`--dry-run` of an agent's run: batch arithmetic, an episode of each environment, what is trained, what is written.

    torchrun --nproc-per-node 8 -m spmd_rl.agentic --dry-run +experiment=demo_frozen_lake

Nothing is written and no weights are loaded. The environments run in this process, and are played by their own
`solution()` where they have one. A mistake ends it as it would end the run.
"""

import asyncio
from contextlib import closing

from rich.console import Console
from rich.text import Text

from spmd_rl.config.batch_arithmetic import describe_evaluation, describe_samples
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.data import EnvTasks
from spmd_rl.dry_run import outputs, roles_and_ranks, short, table, without_torch
from spmd_rl.errors import UserError
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.rollout import demonstrate
from spmd_rl.sidecar import LocalEnvironments
from spmd_rl.types import Environments, Group, Prompt, SessionLost

SHOWN = 3
"""Episodes that are shown, at least one of each environment"""


def show(cfg: AgenticConfig) -> None:
    """Print the preview of a run. UserError for what would end it before its first step."""
    tasks = EnvTasks(cfg.env, cfg.eval.prompts)
    with without_torch():
        tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.env.chat_template_kwargs)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table(console, "Batch arithmetic", _arithmetic(cfg, tasks))
    with closing(LocalEnvironments(cfg.env)) as environments:
        for number in range(max(SHOWN, len(cfg.env.tags))):
            task = tasks.ticket(number, cfg.seed)[1]
            _show_episode(console, task, cfg, environments, tokenizer)
        for tag in cfg.env.tags:
            table(console, f"env.{tag}", asyncio.run(_returns(cfg, tag, tasks, environments, tokenizer)))
    table(console, "Would be written", outputs(cfg))
    console.print("\nWhat a rank would hold in memory: --plan in the place of --dry-run.")


def _arithmetic(cfg: AgenticConfig, tasks: EnvTasks) -> list[tuple[str, str]]:
    """Return the lines of the first table."""
    r, ranks, updates = cfg.rollout, world_size(), cfg.train.updates_per_step
    shards = ranks // cfg.train.ranks_per_shard
    samples = r.prompts_per_step * r.answers_per_prompt
    shares = {tag: env.share for tag, env in cfg.env.tags.items()}
    turns = f"at most {r.max_turns} turns" if r.max_turns else "no limit of turns"
    context = f", {r.max_context_tokens} tokens" if r.max_context_tokens else ""
    places = ", ".join(f"{tag} {env.workers * env.envs_per_worker}" for tag, env in cfg.env.tags.items())
    warmup = f"{cfg.warmup.steps} steps on {cfg.warmup.episodes} demonstrations each" if cfg.warmup.steps else "none"
    return [
        *roles_and_ranks(cfg),
        ("environments", ", ".join(f"{tag} {share / sum(shares.values()):.0%}" for tag, share in shares.items())),
        ("at once", f"{places} a node, in sidecar workers"),
        ("a step", f"{describe_samples(r)}; {samples / shards:g} a data shard"),
        ("an episode", f"{turns} of at most {r.max_new_tokens} sampled tokens{context}"),
        ("updates", f"{updates} a step of {samples / updates:g} episodes, {cfg.steps * updates} in all"),
        ("warm-up", warmup),
        ("optimizer", f"{cfg.algorithm.name} ({cfg.algorithm.advantage}): lr {cfg.policy.lr:g}, {cfg.policy.schedule}"),
        ("evaluation", describe_evaluation(cfg, len(tasks.eval))),
    ]  # fmt: skip


def _show_episode(
    console: Console, task: Prompt, cfg: AgenticConfig, environments: Environments, tokenizer: Tokenizer
) -> None:
    """Print an episode as the model sees it, what is trained in colour."""
    group = asyncio.run(demonstrate(task, 0, cfg, environments, tokenizer))
    verdict = group.samples[-1].verdict
    console.print()
    console.print(Text(f"env.{task.domain}, seed {task.extra['seed']}", "bold"))
    for sample in group.samples:
        for turn in sample.turns:
            console.print(Text(short(tokenizer.visible(turn.prompt_ids)), "bright_black"), end="")
            console.print(Text(short(tokenizer.visible(turn.token_ids)), "green"))
    tokens = sum(len(turn.token_ids) for sample in group.samples for turn in sample.turns)
    given = sum(len(turn.prompt_ids) for sample in group.samples for turn in sample.turns)
    if verdict.scored:
        rewards = ", ".join(f"{turn.step.reward:g}" for sample in group.samples for turn in sample.turns if turn.step)
        console.print(f"[return {verdict.score:g} = {rewards}; {tokens} tokens trained (green), {given} without loss]")
    else:
        console.print(Text(f"! {verdict.detail}", "bold yellow"))


async def _returns(
    cfg: AgenticConfig, tag: str, tasks: EnvTasks, environments: Environments, tokenizer: Tokenizer
) -> list[tuple[str, str]]:
    """Say what an environment pays to its own solution, and to answers without an action."""
    env, own = cfg.env.tags[tag], [task for task in tasks.eval if task.domain == tag][:SHOWN]
    solved: list[Group] = [await demonstrate(task, 0, cfg, environments, tokenizer) for task in own]
    paid = [group.samples[-1].verdict for group in solved]
    lines = [("target", env.target)]
    if paid and all(verdict.scored for verdict in paid):
        lines.append(("its solution", "return " + ", ".join(f"{verdict.score:g}" for verdict in paid)))
    try:
        session = await environments.reset(tag, own[0].extra["seed"] if own else 0, held_out=True)
        reply = await session.step("")
        await session.close()
    except SessionLost as lost:
        raise UserError(f"env.{tag}.target: {env.target}: {lost.detail}", lost.traceback) from None
    penalty = f" and format_penalty {env.format_penalty:g}" if env.format_penalty else ""
    valid = reply.info.get("metrics", {}).get("action_is_valid")
    said = "" if valid is None else f"; it calls it {'valid' if valid else 'not valid'}"
    return [*lines, ("no action", f"reward {reply.reward:g}{penalty}{said}")]
