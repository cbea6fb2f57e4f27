"""Shows what a run would do: batch arithmetic, three prompts, their rewards, an audit, what it would write.

    python -m spmd_rl dry_run rlvr data.train=openai/gsm8k:main
    torchrun --nproc-per-node 8 -m spmd_rl.rlvr --dry-run data.train=openai/gsm8k:main

Nothing is written, no weights are loaded, and torch is imported only for a model that takes pictures. It ends at a
mistake as the run would, and at a reward that fails, or does not pay the right answer in the prompt's form.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.text import Text

from spmd_rl import sidecar
from spmd_rl.base.errors import UserError, aligned, plural, printable
from spmd_rl.base.hub import model_folder
from spmd_rl.base.waits import phase
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.config.batch_arithmetic import (
    describe_evaluation,
    describe_samples,
    describe_tokens,
    has_turns,
    tokens_per_turn,
)
from spmd_rl.config.checks import loaded_roles
from spmd_rl.config.model_files import describe_model, num_weights
from spmd_rl.config.placement import Placement, ranks_do
from spmd_rl.config.ranks import world_size
from spmd_rl.config.schema import JobConfig, RlConfig, RlvrConfig
from spmd_rl.data import Prompts
from spmd_rl.data.prompts import with_line_breaks
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer, render_prompt
from spmd_rl.sidecar.support import counted, unsupported
from spmd_rl.tools import reward_audit
from spmd_rl.tools.answer_form import fill
from spmd_rl.tools.reward_audit import BARE, GOLD, UNSUPPORTED, Kind, Trial
from spmd_rl.types import Prompt, Rewarder, Verdict

SHOWN = 3
RENDERED = 4000
"""Number of prompts to render for their lengths"""
ASKED = 100
"""Rows of a domain to check its reward with"""
MAX_CHARACTERS = 1500
"""Most characters shown of a prompt's part"""


def show(cfg: RlvrConfig) -> None:
    """Print a run's preview. UserError for mistakes that would end it before its first step."""
    with phase("reading the prompts"):
        prompts = Prompts.load(cfg.data)
    sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)
    with phase("loading the tokenizer"), without_torch(cfg.policy.model):
        policy = cfg.policy
        tokenizer = load_tokenizer(policy.model, policy.trust_remote_code, cfg.data.chat_template_kwargs)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = reward_audit.asked_about(prompts)
    with phase("rendering the prompts"):
        lengths = _lengths(prompts.train or prompts.eval, tokenizer)
    fitting = [length for length in lengths if length <= cfg.rollout.max_prompt_tokens]
    if not fitting or (cfg.data.overlong == "error" and len(fitting) < len(lengths)):
        raise UserError(
            f"rollout.max_prompt_tokens={cfg.rollout.max_prompt_tokens}: {len(lengths) - len(fitting)} of "
            f"{len(lengths)} prompts are longer, the longest has {max(lengths)} tokens"
        )
    table(console, "Batch arithmetic", _arithmetic(cfg, prompts, lengths, max(fitting)))
    domains = sorted({prompt.domain for prompt in shown})
    rewarders, found = {}, {}
    own = {domain: [prompt for prompt in shown if prompt.domain == domain] for domain in domains}
    for domain, rows in own.items():
        reward = cfg.reward.domains[domain]
        with phase(f"asking reward.{domain}"):
            rewarders[domain] = reward_audit.build_rewarder(domain, reward)
            if not isinstance(rewarders[domain], str):
                template = with_line_breaks(cfg.data.format)
                found[domain] = reward_audit.audit_apart(domain, reward, rewarders[domain], rows, SHOWN, template)
    for prompt in _spread(shown):
        lines, answer = _rewards(rewarders[prompt.domain], prompt, found.get(prompt.domain, {}))
        _show_prompt(console, prompt, lines, answer, tokenizer, cfg.rollout.max_new_tokens)
    table(console, "Rewarders", [(domain, _examples(rewarders[domain])) for domain in domains])
    table(console, "Audit", [(domain, _audit(rewarders[domain], found.get(domain), own[domain])) for domain in domains])
    table(console, "Would be written", outputs(cfg))
    console.print("\nFor the memory of a rank, use --plan instead of --dry-run.")
    failed = [f"reward.{domain}.target: {cfg.reward.domains[domain].target}: {line}"
              for domain, kinds in found.items()
              for line in (*reward_audit.unjudged(kinds), *reward_audit.unpaid(kinds))]  # fmt: skip
    if failed:
        raise UserError(failed[0] + f" (and {len(failed) - 1} more)" * (len(failed) > 1))


@contextmanager
def without_torch(model: str) -> Iterator[None]:
    """Hide torch from transformers, which takes seconds to import it, unless pictures need it."""
    if "torch" in sys.modules or sees_pictures(model_folder(model)):
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A None in `sys.modules` makes `import torch` fail, which transformers handles.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _lengths(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[int]:
    # Rendering all prompts of a large dataset would take minutes.
    stride = math.ceil(len(prompts) / RENDERED)
    return [len(render_prompt(tokenizer, prompt)) for prompt in prompts[::stride]]


def _arithmetic(cfg: RlvrConfig, prompts: Prompts, lengths: list[int], longest: int) -> list[tuple[str, str]]:
    r, (shards, replicas) = cfg.rollout, shards_and_replicas(cfg)
    updates = cfg.train.updates_per_step
    samples, at_most = r.prompts_per_step * r.answers_per_prompt, tokens_per_turn(r, longest)
    turns = has_turns(r, plays=False)
    a_turn = turns and not r.max_context_tokens
    step_tokens, used = samples * at_most, cfg.steps * r.prompts_per_step
    microbatches = math.ceil(step_tokens / shards / updates / cfg.train.tokens_per_microbatch)
    overlong = sum(length > r.max_prompt_tokens for length in lengths)
    kept = max(1, round(len(prompts.train) * (1 - overlong / len(lengths))))
    epoch = math.ceil(kept / r.prompts_per_step)
    unused = [domain for domain, share in (cfg.data.mix or {}).items() if not share]
    return [
        *roles_and_ranks(cfg),
        ("prompts", f"{len(prompts.train)} for training, {len(prompts.eval)} held out, {prompts.num_dropped} dropped"
                    + (f"; {prompts.num_unused} not trained on: data.mix.{', data.mix.'.join(unused)}=0"
                       if prompts.num_unused else "")),
        ("prompt tokens", f"mean {mean(lengths):.0f}, longest {max(lengths)}, limit {r.max_prompt_tokens}"
                          + (f"; {overlong} of {len(lengths)} are longer (data.overlong={cfg.data.overlong})"
                             if overlong else "")),
        ("a step", f"{describe_samples(r)}; {samples / replicas:g} a replica, {samples / shards:g} a data shard"),
        ("its tokens", describe_tokens(r, turns, longest)),
        ("updates", f"{updates * cfg.algorithm.sample_epochs} a step of {samples / updates:g} samples, "
                    f"{cfg.role('policy').total_updates} in all; each at most "
                    f"{microbatches} micro-batches of {cfg.train.tokens_per_microbatch} tokens a data shard"
                    + " and turn" * a_turn),
        ("epochs", f"{epoch} steps make one; {cfg.steps} steps use {used} prompts = {used / kept:.2f}"),
        ("KV cache", f"{cfg.engine.kv_tokens} tokens a replica: {cfg.engine.kv_tokens // at_most} longest "
                     f"{'turns' if a_turn else 'samples'} at a time (engine.max_running={cfg.engine.max_running})"),
        ("optimizer", f"{cfg.algorithm.name}: lr {cfg.policy.lr:g}, {cfg.policy.schedule}, "
                      f"{cfg.policy.warmup_steps} warm-up updates"),
        ("evaluation", describe_evaluation(cfg.eval, cfg.steps, len(prompts.eval))),
    ]  # fmt: skip


def roles_and_ranks(cfg: RlConfig) -> list[tuple[str, str]]:
    """Return all pipelines' first lines: models, dtype and ranks' tasks."""
    placement, (shards, replicas) = Placement.of(cfg.placement, world_size()), shards_and_replicas(cfg)
    ranks = f"{placement.held}{len(placement.train)}"
    if cfg.placement.is_split:
        ranks = f"{placement.held}{ranks_do(placement.train, 'train')}, {ranks_do(placement.generate, 'generate')}"
    elif cfg.placement.is_overlapped:
        ranks = f"{ranks}, each of which generates the next step before it trains"
    axes = " x ".join(f"{axis} {size}" for axis, size in cfg.train.used_axes.items())
    return [
        ("model", f"{cfg.policy.model}: {describe_model(model_folder(cfg.policy.model))}"),
        ("dtype", f"{dtype(cfg.policy.dtype)}; master weights and optimizer float32"),
        *((role.name, str(role.own.model)) for role in loaded_roles(cfg.roles) if role.name != "policy"),
        ("ranks", f"{ranks}: {cfg.train.name} in {plural(shards, 'data shard')} x {axes}; "
                  f"{cfg.engine.name} in {plural(replicas, 'replica')} x {cfg.engine.axes}"),
    ]  # fmt: skip


def shards_and_replicas(cfg: RlConfig) -> tuple[int, int]:
    """Return the numbers of data shards and engine replicas."""
    placement = Placement.of(cfg.placement, world_size())
    shards, replicas = len(placement.train) // cfg.train.ranks_per_shard, len(placement.generate) // cfg.engine.ranks
    # A job with only one of the two tasks belongs to another job that has at least one.
    return max(1, shards), max(1, replicas)


def dtype(name: str) -> str:
    """Return text on `policy.dtype`'s meaning."""
    return "auto: bfloat16 if the hardware of all ranks supports it, else float32" if name == "auto" else name


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    firsts = list({prompt.domain: prompt for prompt in reversed(prompts)}.values())[::-1]
    rest = [prompt for prompt in prompts[: 2 * SHOWN] if prompt not in firsts]
    return [*firsts, *rest][:SHOWN]


def _show_prompt(
    console: Console, prompt: Prompt, lines: list[str], answer: str, tokenizer: Tokenizer, limit: int
) -> None:
    ids, answer_ids = tokenizer.render(prompt.messages), tokenizer.encode(answer)
    answer_ids.extend(tokenizer.stop_ids[-1:])
    if len(answer_ids) > limit:
        lines.append(f"! this answer has {len(answer_ids)} tokens, more than rollout.max_new_tokens={limit}")
    if (read := tokenizer.decode(tokenizer.encode(answer))).strip() != answer.strip():
        # Decoding drops special tokens, and a form made of them never reaches the reward.
        lines.append(f"! a reward reads this answer without its special tokens: {read!r:.200}")
    console.print()
    console.print(Text(printable(f"Prompt {prompt.id}, domain {prompt.domain}", lines=False), "bold"))
    console.print(Text(f"[{len(ids)} tokens, no loss]", "bold"))
    console.print(Text(short(tokenizer.visible(ids)), "bright_black"))
    console.print(Text(f"[{len(answer_ids)} tokens, trained: the ground truth, as an example]", "bold"))
    console.print(Text(short(tokenizer.visible(answer_ids)), "green"))
    for line in lines:
        console.print(Text(printable(line), "bold yellow" if line.startswith("!") else ""))


def _rewards(rewarder: Rewarder | str, prompt: Prompt, kinds: dict[str, Kind]) -> tuple[list[str], str]:
    """Return the scores of a right and a wrong answer as lines, and the right one in the model's form, or the paid
    one."""
    if isinstance(rewarder, str):
        return [f"The rewarder {rewarder}."], prompt.ground_truth
    if UNSUPPORTED in kinds and (reason := kinds[UNSUPPORTED].unsupported.get(prompt.id)):
        return [f"The row is left out, because its reward cannot judge it: {reason}"], prompt.ground_truth
    trial = kinds[GOLD].trials.get(prompt.id) if GOLD in kinds else None
    if trial is None:
        return ["The row has no ground truth to be scored, or the row before it took too long."], prompt.ground_truth
    return _told(trial), fill(trial.best(trial.asked), trial.gold)


def _told(trial: Trial) -> list[str]:
    best, asked = trial.best(), trial.best(trial.asked)
    lines = [f"reward of {trial.gold!r:.200}: {_said(trial.verdicts[BARE])}"]
    if asked in trial.asked:
        lines.append(f"reward of {fill(asked, trial.gold)!r:.200}, as the prompt asks: {_said(trial.verdicts[asked])}")
    elif not trial.asked:
        lines.append("The prompt asks for no form of the answer, so the bare answer is scored.")
    lines.append(f"reward of {trial.other!r:.200}: {_said(trial.wrong[BARE])}")
    if trial.problem:
        return [*lines, f"! {trial.problem}"]
    if not trial.asked and trial.verdicts[BARE].score < trial.verdicts[best].score:
        said = f"{fill(best, trial.gold)!r:.200}, {_said(trial.verdicts[best])}"
        lines.append(f"! it scores more as {said}: does data.format ask for that?")
    return lines


def _said(verdict: Verdict) -> str:
    return f"{verdict.score:g} ({verdict.status})" if verdict.scored else f"{verdict.status}: {verdict.detail}"


def _examples(rewarder: Rewarder | str) -> str:
    if isinstance(rewarder, str) or not hasattr(rewarder, "examples"):
        return rewarder if isinstance(rewarder, str) else "has no examples of its own"
    told = reward_audit.score
    wanted = [(answer, right, told(rewarder, prompt, answer)) for prompt, answer, right in rewarder.examples()]
    odd = [(answer, right, got) for answer, right, got in wanted if not got.scored or got.score != right]
    text = f"{len(wanted) - len(odd)} of its own {len(wanted)} examples score as they do with default arguments"
    return text + (f"; the first that does not: {odd[0][0]!r:.80}, {_said(odd[0][2])}" if odd else "")


def _audit(rewarder: Rewarder | str, kinds: dict[str, Kind] | None, prompts: Sequence[Prompt]) -> str:
    if kinds is None or isinstance(rewarder, str):
        return str(rewarder)
    asked = prompts[:: math.ceil(len(prompts) / ASKED)]
    left_out = [reason for prompt in asked if (reason := unsupported(rewarder, prompt))]
    told = f"; {len(left_out)} of {len(asked)} rows are left out: {counted(left_out)}" if left_out else ""
    if paid := reward_audit.paid_cheats(kinds):
        return f"! rewarded for solving nothing: {', '.join(paid)}; python -m spmd_rl audit says more{told}"
    scored, failed = reward_audit.cheats_asked(kinds)
    told = f"; ! {failed} got no score{told}" if failed else told
    if not scored:
        return f"no answer that solves nothing was scored{told}"
    return f"none of {plural(scored, 'answer')} that solve{'s' * (scored == 1)} nothing is rewarded{told}"


def outputs(cfg: RlvrConfig) -> list[tuple[str, str]]:
    """Return files and trackers that the run would write."""
    folder, c = Path(cfg.run.dir), cfg.checkpoint
    steps = [*range(c.every, cfg.steps, c.every)[:4], cfg.steps] if c.every else [cfg.steps]
    held = sorted(path.name for path in folder.glob("checkpoints/step-*"))
    listed = ", ".join(map(str, steps[:4])) + (f" ... {steps[-1]}" if len(steps) > 4 else "")
    return [
        ("run.dir", f"{folder}" + (f", which holds {held[-1]}: the run would continue from there" if held else "")),
        ("files", "config.yaml, metrics.jsonl, samples/, journal/, report.html"),
        ("checkpoints", f"after steps {listed}; the newest {c.keep} are kept, the last one also as hf/{_disk(cfg)}"),
        ("trackers", ", ".join(cfg.track.chosen) or "none"),
    ]  # fmt: skip


def _disk(cfg: JobConfig) -> str:
    count = 0 if cfg.policy.lora.rank else num_weights(model_folder(cfg.policy.model))
    exported = count * (4 if dtype(cfg.policy.dtype) == "float32" else 2)
    return f"; {12 * count / 1e9:.1f} GB each, {exported / 1e9:.1f} more for hf/" if count else ""


def short(text: str) -> str:
    """Return a long text, printable, without its middle."""
    text = printable(text)
    half, cut = MAX_CHARACTERS // 2, len(text) - MAX_CHARACTERS
    return text if cut <= 0 else f"{text[:half]}\n... {cut} characters ...\n{text[-half:]}"


def table(console: Console, title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Print a title, and names and texts in two columns."""
    console.print()
    console.print(Text(title, "bold"))
    console.print(aligned([("", name, printable(text, lines=False)) for name, text in lines]))
