"""Audits the rewards of a run: scores of gold answers, empty ones and known cheats, before a policy exploits them.

    python -m spmd_rl audit [rows=4] +experiment=demo key=value ...

It takes the run's command line (`rlvr --help` lists its settings), writes nothing and loads no weights. The exit code
is 1 if a cheat is paid, if rows cannot be judged (the reward fails, a right answer gets no score, or a row's tests
check nothing), or if a right answer is not paid in the prompt's form.
"""

import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl import sidecar
from spmd_rl.base.command_line import program
from spmd_rl.base.errors import RunFailed, UserError, plural, printable, tell
from spmd_rl.base.waits import phase
from spmd_rl.config.main import main
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.data import Prompts
from spmd_rl.data.prompts import with_line_breaks
from spmd_rl.tools.reward_audit import (
    ASKED,
    GOLD,
    asked_about,
    audit_apart,
    build_rewarder,
    describe,
    paid_cheats,
    unjudged,
    unpaid,
)

ROWS = 4
NAMED = 3
"""Most unjudged rows that the last line names"""


def show(cfg: RlvrConfig, rows: int = ROWS) -> None:
    """Print a table per domain.

    RunFailed, naming them, if worthless answers are paid, or the reward fails on some.
    """
    loaded = Prompts.load(cfg.data)
    prompts, template = asked_about(loaded), with_line_breaks(cfg.data.format)
    sidecar.check_domains({prompt.domain for prompt in prompts}, cfg.reward)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    paid, failed, unheeded, not_asked = [], [], [], []
    trained = {prompt.domain for prompt in loaded.train}
    for domain in sorted({prompt.domain for prompt in prompts}):
        own, reward = [prompt for prompt in prompts if prompt.domain == domain], cfg.reward.domains[domain]
        rewarder = build_rewarder(domain, reward)
        only = ", evaluated only" if trained and domain not in trained else ""
        console.print(
            Text(f"\n{printable(domain)}: {reward.target}, {plural(min(rows, len(own)), 'row')}{only}", "bold")
        )
        if isinstance(rewarder, str):
            console.print(printable(f"  The rewarder {rewarder}.", lines=False))
            not_asked.append(domain)
            continue
        with phase(f"asking reward.{domain}"):
            kinds = audit_apart(domain, reward, rewarder, own, rows, template)
        table = Table(box=None, show_header=False, padding=(0, 2))
        for name, text in describe(kinds):
            table.add_row(Text(name), Text(printable(text), "bold yellow" if "!" in text else ""))
        console.print(table)
        if GOLD not in kinds:
            console.print("  Neither the rows nor the reward have a gold answer.")
        elif not all(trial.is_whole for trial in kinds[GOLD].trials.values()):
            console.print("  The last of these rows took too long, so no other was scored.")
        elif ASKED not in kinds:
            console.print("  The prompts ask for no form of the answer, so the bare answer is scored.")
        paid += [f"{domain}: {name}" for name in paid_cheats(kinds)]
        failed += [f"{domain}, {told}" for told in unjudged(kinds)]
        unheeded += [f"{domain}, {told}" for told in unpaid(kinds)]
    problems = [f"answers that solve nothing are rewarded: {'; '.join(paid)}"] if paid else []
    if failed:
        more = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        problems.append(f"{plural(len(failed), 'row')} cannot be judged: {'; '.join(failed[:NAMED])}{more}")
    if unheeded:
        problems.append(unheeded[0] + f" (and {len(unheeded) - 1} more)" * (len(unheeded) > 1))
    if problems:
        raise RunFailed(". ".join(problems))
    without = f" Domains that were not audited: {', '.join(not_asked)}." if not_asked else ""
    held_out = " Held-out rows of domains that are trained on were not audited." if loaded.train and loaded.eval else ""
    console.print(f"\nNo known cheat is rewarded.{without}{held_out} rows=N audits more rows of each domain.")


def run(argv: Sequence[str]) -> None:
    """Run the command line. UserError for an invalid number of rows."""
    if not {"-h", "--help"}.isdisjoint(argv):
        return print(f"usage: {program('audit')} [rows=N] [key=value ...]\n\n{__doc__}", end="")
    given = [word for word in argv if word.startswith("rows=")]
    rest = [word for word in argv if word not in given]
    if others := {"--dry-run", "--plan", "--cfg", "-c"} & set(argv):
        tell(f"error: {min(others)}: not an option of audit; it is one of {program('rlvr')}")
        sys.exit(2)
    return main(
        "rlvr", RlvrConfig, show, ["--dry-run", *rest], preview=partial(_show, rows=[*given, f"rows={ROWS}"][0])
    )


def _show(cfg: RlvrConfig, rows: str) -> None:
    number = rows.partition("=")[2]
    if not number.isdecimal() or not int(number):
        raise UserError(f"{rows}: must be a positive number")
    show(cfg, int(number))


if __name__ == "__main__":
    run(sys.argv[1:])
