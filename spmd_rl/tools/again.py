"""Executes a step of a run again, from the checkpoint at or before it, perhaps with a setting changed.

    python -m spmd_rl again runs/rlvr/a --step 12                     # the same bits, where a rerun is exact
    python -m spmd_rl again runs/rlvr/a --step 12 policy.lr=1e-5      # and what another setting would have done

Steps in between run unchanged. The result is a run directory, `RUN_DIR/again/...`, compared as by `bisect`. It uses as
many processes here as the run had ranks; `--print` prints the commands for elsewhere.
"""

import hashlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, reason, tell
from spmd_rl.checkpoint.directory import CheckpointDir
from spmd_rl.config.run_identity import CONFIG_FILE
from spmd_rl.tools.bisect import RunTrace, describe, first_difference
from spmd_rl.track.run_reader import RunData, read_run

TRACKERS = ("wandb=off", "swanlab=off", "tensorboard=false", "trackio=false")
ALWAYS = ("checkpoint.every=0", *(f"track.{tracker}" for tracker in TRACKERS))
"""Settings that save only the step, and keep it from trackers"""


def commands(run: RunData, step: int, ranks: int, changed: Sequence[str], out: Path) -> list[list[str]]:
    """Return the commands: one up to the step before, unless a checkpoint is there, and one of the step."""
    directory, words = run.directory.absolute(), shlex.split(run.launch.get("command", ""))
    # The pipeline may be the user's own: a module, or a script.
    module = ["-m", words[words.index("-m") + 1]] if "-m" in words else [word for word in words if word.endswith(".py")]
    if not module:
        raise UserError(f"{run.directory}: its journal does not say which pipeline it ran")
    # Also for a single rank: torchrun sets the number of threads.
    has_agent = ranks > 1 or words[0] == "torchrun"
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if has_agent else []
    config = ["--config-dir", str(directory), "--config-name", Path(CONFIG_FILE).stem]
    start = [sys.executable, *agent, *module[:2], *config, *ALWAYS]
    saved = CheckpointDir(directory / "checkpoints")
    last = max((one for one in saved.steps() if one < step), default=0)
    begin, found = saved.path(last) if last else None, []
    if last < step - 1:
        before = out / "before"
        found.append([*start, f"checkpoint.resume={begin or 'never'}", f"run.dir={before}", f"run.until={step - 1}"])
        begin = CheckpointDir(before / "checkpoints").path(step - 1)
    last_one = [*start, f"checkpoint.resume={begin or 'never'}", f"run.dir={out}", f"run.until={step}", *changed]
    return [*found, last_one]


def run_again(run: RunData, asked: list[list[str]], step: int, out: Path) -> int:
    """Run the commands and print where the step parts from the run's; return the exit code."""
    for command in asked:
        print(shlex.join(command), flush=True)
        if code := subprocess.run(command).returncode:
            tell(f"error: the command ended with exit code {code}")
            return 1
    theirs, ours = RunTrace(run.directory), RunTrace(out)
    if step not in theirs.steps:
        print(f"{run.directory} has nothing of step {step} to compare with")
        return 0
    found = first_difference(theirs, ours, {step})
    if found is None:
        print(f"step {step}: no difference from {run.directory}")
    else:
        print(f"step {step} differs from {run.directory}, first in {describe(found, theirs)}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("again"), description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("changed", nargs="*", metavar="key=value", help="settings of this step alone")
    parser.add_argument("--step", type=at_least(1), required=True, metavar="N")
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help="processes; default: those of the run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: a folder in RUN_DIR/again")
    parser.add_argument("--print", action="store_true", help="print the commands, and run nothing")
    asked = parser.parse_intermixed_args(arguments)
    try:
        run = read_run(asked.run)
        if (run.setting("steps") or 0) < asked.step:
            raise UserError(f"--step {asked.step}: {asked.run} has steps={run.setting('steps')}")
        digest = hashlib.blake2b(" ".join(asked.changed).encode(), digest_size=3).hexdigest()
        name = f"step-{asked.step:06d}{f'-{digest}' if asked.changed else ''}"
        out = (asked.out or asked.run / "again" / name).absolute()
        found = commands(run, asked.step, asked.ranks or run.launch.get("ranks", 1), asked.changed, out)
        if asked.print:
            print(*map(shlex.join, found), sep="\n")
            return 0
        if asked.out and out.exists():
            raise UserError(f"--out {asked.out}: exists; choose another directory")
        # The default is the result of an earlier call with the same words.
        shutil.rmtree(out, ignore_errors=True)
        return run_again(run, found, asked.step, out)
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
