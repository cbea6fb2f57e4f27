"""`--dry-run` of an agent's run: batch arithmetic, an episode of each environment, trained tokens, written files.

    torchrun --nproc-per-node 8 -m spmd_rl.agentic --dry-run +experiment=demo_frozen_lake

Nothing is written and no weights are loaded. Environments run in this process, and are played by their `solution()`;
without one, the first prompt is shown. It ends at a mistake as the run would, and at a failing environment.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from spmd_rl.base.errors import RunFailed, UserError, plural, printable
from spmd_rl.base.waits import phase
from spmd_rl.config.batch_arithmetic import describe_evaluation, describe_samples
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.data import EnvTasks
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.rollout import Demonstrator
from spmd_rl.rollout.prompt_text import first_messages
from spmd_rl.sidecar import LocalEnvironments
from spmd_rl.tools.dry_run import outputs, roles_and_ranks, short, table, without_torch
from spmd_rl.types import Environments, EnvReply, Group, Prompt, SessionLost, Verdict

SHOWN = 3
"""Episodes to show, at least one per environment"""


def show(cfg: AgenticConfig) -> None:
    """Print a run's preview. UserError for mistakes that would end it before its first step."""
    strict = {tag: replace(env, retries=0, on_error="raise") for tag, env in cfg.env.tags.items()}
    # Failures must show at once, not after retries.
    cfg = replace(cfg, env=replace(cfg.env, tags=strict))
    tasks = EnvTasks(cfg.env, cfg.eval.prompts)
    with phase("loading the tokenizer"), without_torch(cfg.policy.model):
        tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.env.chat_template_kwargs)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table(console, "Batch arithmetic", _arithmetic(cfg, tasks))
    not_played: dict[str, str] = {}
    failed: dict[str, UserError] = {}
    with closing(LocalEnvironments(cfg.env, timed=True)) as environments:
        for number in range(max(SHOWN, len(cfg.env.tags))):
            task = tasks.ticket(number, cfg.seed)[1]
            with _told_later(console, failed, task.domain), phase(f"playing env.{task.domain}"):
                not_played[task.domain] = _show_episode(console, task, cfg, environments, tokenizer)
        for tag in cfg.env.tags:
            with _told_later(console, failed, tag), phase(f"playing env.{tag}, held out"):
                table(console, f"env.{tag}", asyncio.run(_returns(cfg, tag, tasks, environments, tokenizer)))
    table(console, "Would be written", outputs(cfg))
    console.print("\nFor the memory of a rank, use --plan instead of --dry-run.")
    for error in failed.values():
        more = f" (and {plural(len(failed) - 1, 'environment')} more)" if len(failed) > 1 else ""
        raise UserError(f"{error}{more}", error.report)
    for tag, reason in not_played.items():
        # The warm-up would fail in its first step, for lack of demonstrations.
        if cfg.warmup.steps and reason:
            raise UserError(f"warmup.steps={cfg.warmup.steps}: env.{tag} shows nothing to learn from: {reason}")


@contextmanager
def _told_later(console: Console, failed: dict[str, UserError], tag: str) -> Iterator[None]:
    """Print an environment's first failure, and continue: the preview ends with it."""
    try:
        yield
    except UserError as error:
        if tag not in failed:
            console.print(Text(f"\n! {printable(str(error), lines=False)}", "bold yellow"))
        failed.setdefault(tag, error)


def _arithmetic(cfg: AgenticConfig, tasks: EnvTasks) -> list[tuple[str, str]]:
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
        ("environments", ", ".join(f"{tag} {share / sum(shares.values()):.0%}" if share else f"{tag} evaluated only"
                                   for tag, share in shares.items())),
        ("at once", f"{places} a node, in sidecar workers"),
        ("a step", f"{describe_samples(r)}; {samples / shards:g} a data shard"),
        ("an episode", f"{turns} of at most {r.max_new_tokens} sampled tokens{context}"),
        ("updates", f"{updates * cfg.algorithm.sample_epochs} a step of {samples / updates:g} episodes, "
                    f"{cfg.role('policy').total_updates} in all"),
        ("warm-up", warmup),
        ("optimizer", f"{cfg.algorithm.name} ({cfg.algorithm.advantage}): lr {cfg.policy.lr:g}, {cfg.policy.schedule}"),
        ("evaluation", describe_evaluation(cfg.eval, cfg.steps, len(tasks.eval))),
    ]  # fmt: skip


def _show_episode(
    console: Console, task: Prompt, cfg: AgenticConfig, environments: Environments, tokenizer: Tokenizer
) -> str:
    group = asyncio.run(_played(task, cfg, environments, tokenizer))
    verdict = group.samples[-1].verdict
    console.print()
    console.print(Text(f"env.{task.domain}, seed {task.extra['seed']}", "bold"))
    if not verdict.scored:
        start = asyncio.run(_first_step(task.domain, task.extra["seed"], cfg, environments))[0]
        numbers = {"turn": 1, "max_tokens": cfg.rollout.max_new_tokens, "turns_left": cfg.rollout.max_turns or 0}
        ids = tokenizer.render(first_messages(cfg.env.tags[task.domain], start, numbers))
        console.print(Text(short(tokenizer.visible(ids)), "bright_black"))
        console.print(f"[not played: {printable(_reason(verdict), lines=False)}]")
        return _reason(verdict)
    for sample in group.samples:
        for turn in sample.turns:
            console.print(Text(short(tokenizer.visible(turn.prompt_ids)), "bright_black"), end="")
            console.print(Text(short(tokenizer.visible(turn.token_ids)), "green"))
    tokens = sum(len(turn.token_ids) for sample in group.samples for turn in sample.turns)
    given = sum(len(turn.prompt_ids) for sample in group.samples for turn in sample.turns)
    rewards = ", ".join(f"{turn.step.reward:g}" for sample in group.samples for turn in sample.turns if turn.step)
    console.print(f"[return {verdict.score:g} = {rewards}; {tokens} tokens trained (green), {given} without loss]")
    return ""


async def _played(task: Prompt, cfg: AgenticConfig, environments: Environments, tokenizer: Tokenizer) -> Group:
    try:
        by = Demonstrator(cfg.env, cfg.rollout, cfg.engine.kv_tokens, cfg.seed, environments, tokenizer)
        return await by.play(task, 0)
    except RunFailed as failed:
        line = str(failed).replace(": error: ", ": ", 1)
        raise UserError(f"{line} ({cfg.env.tags[task.domain].target})", failed.report) from None


def _reason(verdict: Verdict) -> str:
    return verdict.detail.removeprefix("BudgetSpent: ")


async def _first_step(
    tag: str, seed: int, cfg: AgenticConfig, environments: Environments, held_out: bool = False
) -> tuple[EnvReply, EnvReply]:
    """Return an environment's replies to a reset and to an answer without an action. UserError if it fails."""
    try:
        session = await environments.reset(tag, seed, held_out)
        start, reply = session.reply, await session.step("")
        await session.close()
    except SessionLost as lost:
        raise UserError(f"env.{tag}.target: {cfg.env.tags[tag].target}: {lost.detail}", lost.traceback) from None
    return start, reply


async def _returns(
    cfg: AgenticConfig, tag: str, tasks: EnvTasks, environments: Environments, tokenizer: Tokenizer
) -> list[tuple[str, str]]:
    env, own = cfg.env.tags[tag], [task for task in tasks.eval if task.domain == tag][:SHOWN]
    paid = [(await _played(task, cfg, environments, tokenizer)).samples[-1].verdict for task in own]
    lines = [("target", env.target)]
    if failed := next((verdict for verdict in paid if not verdict.scored), None):
        lines.append(("its solution", f"not tried: {_reason(failed)}"))
    elif paid:
        lines.append(("its solution", "return " + ", ".join(f"{verdict.score:g}" for verdict in paid)))
    seed = own[0].extra["seed"] if own else 0
    _, reply = await _first_step(tag, seed, cfg, environments, held_out=True)
    penalty = f" and format_penalty {env.format_penalty:g}" if env.format_penalty else ""
    valid = reply.info.get("metrics", {}).get("action_is_valid")
    said = "" if valid is None else f"; it calls it {'valid' if valid else 'not valid'}"
    return [*lines, ("no action", f"reward {reply.reward:g}{penalty}{said}")]
