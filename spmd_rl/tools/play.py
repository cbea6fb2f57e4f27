"""Plays an environment on the terminal: a person types the actions, or watches the policy play.

    python -m spmd_rl play env.lake.target=envs.frozen_lake:FrozenLake seed=7
    python -m spmd_rl play +experiment=demo_frozen_lake play.policy=true policy.model=runs/x/checkpoints/step-000010/hf

It takes the settings of an agentic run (`agentic --help` lists them) and shows the policy's prompts. `play.env=TAG`
chooses an environment. Actions are typed without the tags of an answer; Ctrl-D ends the game.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import closing

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from spmd_rl.base.command_line import program
from spmd_rl.base.errors import UserError, one_line, printable, tell
from spmd_rl.config.checks import NO_ENVIRONMENT, check, fetch_models
from spmd_rl.config.load import load
from spmd_rl.config.main import parse
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.rollout.prompt_text import first_messages, next_messages
from spmd_rl.sidecar.local import LocalEnvironments, LocalScorer
from spmd_rl.types import AgentStep, Environments, EnvReply, Message, Prompt, Sample, SessionLost

OWN = {"play.policy": "false", "play.env": ""}
"""Words of the command line that are no settings, with defaults"""
WIDTH = 132


async def person(
    cfg: AgenticConfig, tag: str, environments: Environments, ask: Callable[[str], str | None], console: Console
) -> float:
    """Let a person play environment `tag` with the settings' seed; return the sum of rewards.

    ask: from the text before an action to the action, None at the end. SessionLost as in `Environments`.
    """
    env, limit = cfg.env.tags[tag], cfg.rollout.max_turns
    session = await environments.reset(tag, cfg.seed)
    start, total, turn = session.reply, 0.0, 0
    try:
        while not session.reply.done and turn != limit:
            turn += 1
            numbers = {"turn": turn, "max_tokens": cfg.rollout.max_new_tokens}
            numbers |= {} if limit is None else {"turns_left": limit - turn + 1}
            told = (
                next_messages(env, start, session.reply, numbers) if turn > 1 else first_messages(env, start, numbers)
            )
            show_turn(console, told, session.reply)
            action = ask(f"action {turn}{'' if limit is None else f' of {limit}'}> ")
            if action is None:
                break
            reply = await session.step(action.strip())
            metrics = reply.info.get("metrics", {})
            reward = reply.reward + sum(env.penalties(action.strip(), metrics).values())
            total += reward
            show_outcome(console, action.strip() or None, reward, metrics)
        end = "terminated" if session.reply.terminated else "truncated" if session.reply.truncated else ""
        show_end(console, session.reply, end or ("max_turns" if turn == limit else "given up"), total)
    finally:
        await session.close()
    return total


def show_turn(console: Console, told: Sequence[Message], reply: EnvReply) -> None:
    """Print the policy's messages, and the board if they lack it."""
    for message in told:
        console.print(_block(message.text, "dim" if message.role == "system" else ""))
    board = str(reply.info.get("board", ""))
    if board and board.strip() not in "\n".join(message.text for message in told):
        console.print(_block(board, "bold"))


def show_outcome(console: Console, action: str | None, reward: float, metrics: dict[str, float]) -> None:
    """Print an action's reward and metrics."""
    line = Text("no action" if action is None else printable(action), "bold")
    line.append(f"  reward {reward:+.3g}", "green" if reward > 0 else "red" if reward < 0 else "not bold")
    line.append("".join(f"  {printable(str(name))} {value:g}" for name, value in metrics.items()), "not bold dim")
    console.print(line)


def show_end(console: Console, reply: EnvReply, reason: str, total: float) -> None:
    """Print the last observation, why the episode ended, and its return."""
    console.print(_block(str(reply.info.get("board", "")) or reply.observation))
    console.print(Text(f"{reason}, return {total:+.3g}", "bold"))


def show_sample(console: Console, samples: Sequence[Sample], visible: Callable[[Sequence[int]], str]) -> None:
    """Print the policy's episode turn by turn. visible: token ids to text."""
    for sample in samples:
        for turn in sample.turns:
            console.print(_block(visible(turn.prompt_ids), "dim"), _block(turn.text), sep="\n")
            if step := turn.step:
                show_outcome(console, step.action, step.reward, dict(step.metrics))
    verdict = samples[-1].verdict
    if not verdict.scored:
        raise SessionLost("error", verdict.detail)
    last: AgentStep | None = samples[-1].turns[-1].step
    reply = EnvReply(last.observation, info={"board": last.board}) if last else EnvReply("")
    stops = [name.removeprefix("stop/") for name, value in verdict.parts.items() if name.startswith("stop/") and value]
    show_end(console, reply, ", ".join(stops), verdict.score)


def _block(text: str, style: str = "") -> Padding:
    return Padding(Text(printable(text.strip("\n")), style), (0, 0, 1, 2))


def build_policy(cfg: AgenticConfig, tag: str, environments: Environments) -> Callable[[Console], None]:
    """Load the policy into the engine; return a function that plays and prints an episode."""
    import torch

    from spmd_rl import engine
    from spmd_rl.data import EnvTasks
    from spmd_rl.distributed.dtype import agree_on_dtype
    from spmd_rl.distributed.solo import solo
    from spmd_rl.model.build import build_model, weights_of
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.rollout import Agent, Rollouts, Sampling, Services
    from spmd_rl.weights.quantized import quantized

    def watch(console: Console) -> None:
        rollout, policy = cfg.rollout, cfg.policy
        tokenizer = load_tokenizer(policy.model, policy.trust_remote_code, cfg.env.chat_template_kwargs)
        with solo() as world:
            agree_on_dtype(world, policy)
            generator = engine.build(cfg.engine, policy, cfg.train.offload, world, rollout.constraint)
            model = build_model(policy.model, getattr(torch, policy.dtype), world.device, policy.trust_remote_code)
            generator.load(quantized(iter(weights_of(model).items()), cfg.engine.quantization), 0)
            task = Prompt("0" * 32, (), tag, "", {"seed": cfg.seed, "held_out": False})
            sampling = Sampling(cfg.seed, "play", rollout.temperature, rollout.max_new_tokens, rollout.stop_strings)
            services = Services(LocalScorer(None), tokenizer, Agent(cfg.env), environments)
            rollouts = Rollouts(cfg.generation, generator, EnvTasks(cfg.env, 0), services, world)
            (group,) = rollouts.answer([task], [sampling])
            rollouts.close()
            generator.close()
        show_sample(console, group.samples, tokenizer.visible)

    return watch


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code: 2 for a mistake in it, 1 for a failing environment."""
    own = OWN | dict(word.split("=", 1) for word in argv if word.partition("=")[0] in OWN and "=" in word)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        if not {"-h", "--help"}.isdisjoint(argv):
            print(f"usage: {program('play')} [play.policy=true] [play.env=TAG] [key=value ...]\n\n{__doc__}", end="")
            return 0
        # The other words are settings of a run, which `play.*` are not.
        asked = parse("agentic", AgenticConfig, [word for word in argv if word.partition("=")[0] not in OWN])
        cfg = load("agentic", AgenticConfig, asked.overrides, asked.config_dir, asked.config_name)
        tag = _tag(cfg, own["play.env"])
        if own["play.policy"].lower() not in ("true", "false"):
            raise UserError(f"play.policy: must be true or false, not {own['play.policy']!r}")
        with closing(LocalEnvironments(cfg.env)) as environments:
            if own["play.policy"].lower() == "true":
                check(cfg)
                fetch_models(cfg.roles)
                build_policy(cfg, tag, environments)(console)
            else:
                asyncio.run(person(cfg, tag, environments, _ask, console))
        return 0
    except UserError as error:
        tell(f"error: {error}")
        return 2
    except SessionLost as lost:
        tell(f"error: {one_line(str(lost))}")
        return 1
    except KeyboardInterrupt:
        return 130


def _tag(cfg: AgenticConfig, asked: str) -> str:
    tags = cfg.env.tags
    if not tags:
        raise UserError(NO_ENVIRONMENT)
    if asked in tags or (not asked and len(tags) == 1):
        return asked or next(iter(tags))
    why = f"no environment {asked!r}" if asked else "which of the environments"
    raise UserError(f"play.env: {why}; known: {', '.join(tags)}")


def _ask(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
