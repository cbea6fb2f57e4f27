"""Terminal view: tables of runs, steps and samples, and trajectories by turns with coloured tokens.

Control characters in a model's text are escaped, so that no terminal acts on them.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spmd_rl.base.errors import UserError, printable
from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.track.page_data import files, title
from spmd_rl.track.run_reader import RunData, plain_text
from spmd_rl.track.samples import KINDS
from spmd_rl.track.tokens import TokenTexts
from spmd_rl.track.trajectories import TrajectoryRow, mean_score, rows, whole

COLORS = ("none", "logprob", "mask", "advantage", "version")
WIDTH = 132
PALETTE = ("blue", "yellow", "green", "magenta", "cyan", "red")
IMPROBABLE = ((-4.0, "bold red"), (-2.0, "red"), (-1.0, "yellow"), (-0.3, "cyan"))
"""Colours of a token by its range's largest logprob, in nats"""


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a run to show."""

    kind: str
    step: int | None
    sample: str | None
    """`TICKET.ANSWER`, or `TICKET` for the whole group"""
    color: str


def show(runs: RunIndex, place: Selection) -> None:
    """Print the selection. UserError for a missing step or sample."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    names = runs.names()
    if len(names) > 1:
        if place.step is not None or place.sample is not None:
            raise UserError(f"{runs.root}: holds {len(names)} runs; name the directory of one")
        console.print(_runs(runs))
        return
    run = runs.read(names[0])
    found = files(run, place.kind)
    if place.step is None and place.sample is None:
        console.print(Text(printable(title(run), lines=False), "bold"), _steps(run), sep="\n")
        return
    step = max(found, default=None) if place.step is None else place.step
    if step not in found:
        raise UserError(f"--step {step}: {_known(run)}")
    listed = rows(found[step])
    if place.sample is None:
        console.print(Text(printable(f"{title(run)}, step {step}", lines=False), "bold"), _samples(listed), sep="\n")
        return
    texts = TokenTexts(run.setting("policy.model"))
    for row in _chosen(listed, place.sample):
        console.print(_trajectory(texts.add(whole(found[step], row)), place.color))


def _known(run: RunData) -> str:
    trained, held_out = (
        " to ".join(map(str, sorted({*list(found)[:1], *list(found)[-1:]}))) or "none"
        for found in (files(run, kind) for kind in KINDS)
    )
    return f"no samples of this step; of training there are {trained}, with --held-out {held_out}"


def _runs(runs: RunIndex) -> Table:
    table = _table("run", "name", "pipeline", "steps", "score")
    for one in runs.summaries():
        steps = f"{one['last']} of {one['planned']}" if one["planned"] else str(one["last"])
        table.add_row(*_cells(one["run"], one["title"], one["pipeline"], steps, _number(one["score"])))
    return table


def _steps(run: RunData) -> Table:
    table = _table("step", "samples", "score", "tokens", "ends", "held-out", "score", "greedy")
    trained, held_out = (files(run, kind) for kind in KINDS)
    for step in sorted({*trained, *held_out}):
        cells = [f"{step} warm-up" if 0 < step <= (run.setting("warmup.steps") or 0) else str(step)]
        if step in trained:
            of = rows(trained[step])
            ends = ", ".join(f"{name} {count}" for name, count in Counter(row.end for row in of).most_common())
            cells += [
                str(len(of)),
                _number(mean_score(of)),
                _number(fmean(row.tokens for row in of) if of else None),
                ends,
            ]
        else:
            cells += [""] * 4
        if step in held_out:
            of = rows(held_out[step])
            # Sampled and greedy answers apart, as the metrics have them.
            apart = ([row for row in of if row.greedy is greedy] for greedy in (False, True))
            cells += [str(len(of)), *(_number(mean_score(each)) for each in apart)]
        table.add_row(*_cells(*cells))
    return table


def _samples(listed: Sequence[TrajectoryRow]) -> Table:
    table = _table("sample", "domain", "score", "advantage", "turns", "tokens", "end", "trained on", "answer")
    for row in listed:
        why = "yes" if row.kept else row.reject_reason
        name = f"{row.ticket}.{row.answer}{' greedy' * row.greedy}"
        numbers = (_number(row.score), _number(row.advantage), row.turns, row.tokens)
        table.add_row(*_cells(name, row.domain, *numbers, row.end, why, row.text[:60]))
    return table


def _chosen(listed: Sequence[TrajectoryRow], sample: str) -> list[TrajectoryRow]:
    ticket, _, answer = sample.partition(".")
    found = [row for row in listed if str(row.ticket) == ticket and answer in ("", str(row.answer))]
    if not found:
        raise UserError(f"--sample {sample}: this step has no such sample; --step N lists them")
    return found


def _trajectory(one: Mapping[str, Any], color: str) -> Group:
    facts = [f"score {_number(one['score'])}", f"end {one['end']}", f"{one['turns']} turns", f"{one['tokens']} tokens"]
    facts += [] if one["advantage"] is None else [f"advantage {one['advantage']:+.3g}"]
    facts += [] if one["kept"] else [f"not trained on: {one['reject_reason']}"]
    facts += ["greedy"] * bool(one["greedy"])
    facts += [one["verdict"]["detail"]] if one["verdict"].get("detail") else []
    name = printable(f"{one['ticket']}.{one['answer']} {one['domain']}", lines=False)
    heading = Text(name, "bold").append(printable("   ".join(["", *facts]), lines=False), "not bold")
    return Group(Rule(style="dim"), heading, *_task(one), *_turns(one, color))


def _task(one: Mapping[str, Any]) -> Iterator[Padding]:
    for message in one["messages"] or ():
        yield _indented(Text(printable(f"{message['role']}: {plain_text(message['content'])}"), "dim"))


def _turns(one: Mapping[str, Any], color: str) -> Iterator[Any]:
    number = 0
    for segment in one["segments"]:
        for turn in segment["turns"]:
            number += 1
            if turn["prompt"] is not None and (number == 1 or not turn.get("step")):
                yield _indented(Text(printable(turn["prompt"]), "dim"))
            yield Text(f"turn {number}", "bold")
            yield _indented(_tokens(turn, segment, color))
            if step := turn.get("step"):
                yield _indented(_environment(step))


def _tokens(turn: Mapping[str, Any], segment: Mapping[str, Any], color: str) -> Text:
    if turn["tokens"] is None:
        return Text(printable(turn["text"])).append(f"\n{turn['token_ids']}", "dim")
    shown, advantage = Text(), turn.get("advantage", segment["advantage"])
    values = zip(turn["tokens"], turn["logprobs"], turn["versions"], strict=True)
    for text, logprob, version in values:
        # A model may emit escape sequences that a terminal would execute.
        shown.append(printable(text), _style(color, logprob, version, advantage, segment["kept"]))
    return shown


def _style(color: str, logprob: float, version: int, advantage: float | None, kept: bool) -> str:
    if color == "logprob":
        return next((style for limit, style in IMPROBABLE if logprob <= limit), "")
    if color == "mask":
        return "green" if kept else "dim"
    if color == "version":
        return PALETTE[version % len(PALETTE)]
    if color == "advantage" and advantage:
        return "blue" if advantage > 0 else "red"
    return ""


def _environment(step: Mapping[str, Any]) -> Columns:
    reward = step["reward"]
    action = "no action" if step["action"] is None else f"action {step['action']}"
    outcome = Text(printable(action), "bold").append(
        f"   reward {reward:+.3g}", "green" if reward > 0 else "red" if reward < 0 else ""
    )
    for name, value in step.get("metrics", {}).items():
        outcome.append(printable(f"\n{name} {_number(value)}"), "dim")
    board = Text(printable(step.get("board") or step["observation"]))
    return Columns([outcome, board], padding=(0, 6))


def _indented(content: Any) -> Padding:
    return Padding(content, (0, 0, 1, 2))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    numbers = {"score", "advantage", "turns", "tokens", "samples", "held-out", "greedy"}
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _cells(*values: object) -> list[Text]:
    return [Text("" if value is None else printable(str(value), lines=False)) for value in values]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
