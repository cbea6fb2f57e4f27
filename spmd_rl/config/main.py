"""The boundary of a rank: command line in, exit code out.

    if __name__ == "__main__":
        main("rlvr", RlvrConfig, run)

    | end of the run                   | last on stderr         | exit code |
    |----------------------------------|------------------------|-----------|
    | a user's mistake, a full disk    | `error: ` and one line | 2         |
    | `RunFailed`                      | `error: ` and one line | 1         |
    | a mistake of ours                | a traceback            | 1         |
    | Ctrl-C                           | `interrupted`          | 130       |
    | a signal, and the step is saved  | a line                 | 128 + it  |

The line also goes into torchrun's report, and to `error.txt` in `run.dir`, if that exists or the command names it.
Ranks that fail alike print it once. With `steps=0`, a command of reinforcement learning evaluates.
"""

import argparse
import errno
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.errors import Disagreement, RunFailed, Stopped, UserError, one_line, printable, tell
from spmd_rl.base.process import LAUNCHER, tell_torchrun
from spmd_rl.base.waits import phase
from spmd_rl.config.apply import apply
from spmd_rl.config.checks import check, check_plan, fetch_models
from spmd_rl.config.docs import entries, options
from spmd_rl.config.keys import leaves, suggestion, to_dict
from spmd_rl.config.load import CONFIGS, build, chosen, compose, load
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.config.ranks import local_rank, rank
from spmd_rl.config.resume import continue_run
from spmd_rl.config.run_identity import run_dir, to_yaml
from spmd_rl.config.schema import EvaluateConfig, RlConfig
from spmd_rl.config.sections.run import PlanConfig, is_name
from spmd_rl.config.unused import unused_settings
from spmd_rl.config.values import require

ERROR_FILE = "error.txt"
PLAN = "spmd_rl.tools.plan:show"
"""Function behind `--plan` of pipelines with an engine, as `module:function`."""
EVALUATE, NO_STEPS = "spmd_rl.evaluate:run", "steps=0"
BEGAN = time.time()
GRACE_SECONDS = 10.0
"""Seconds for local rank 0 to report the same error and torchrun to stop, before the process group forms"""


def main(
    pipeline: str,
    schema: type,
    run: Callable[[Any], None],
    argv: Sequence[str] | None = None,
    preview: str | Callable[[Any], None] = "",
    plan: str = PLAN,
) -> None:
    """Compose, check, run. Returns after success, else exits with the code above.

    preview: function, or `module:function`, that `--dry-run` calls instead of `run`. plan: `module:function` that
    `--plan` calls.
    """
    argv = sys.argv[1:] if argv is None else argv
    if NO_STEPS in argv and issubclass(schema, RlConfig):
        return _evaluate(schema, argv)
    exit_ = Exit(given_run_dir(pipeline, argv))
    try:
        asked = parse(pipeline, schema, argv)
        if asked.help:
            return say(help_text(pipeline, schema, run, asked))
        if shows := asked.cfg or asked.dry_run or asked.plan:
            exit_.folder = None  # a preview writes no file, not even its error
        cfg = load(pipeline, schema, asked.overrides, asked.config_dir, asked.config_name)
        if asked.cfg:
            return say(to_yaml(to_dict(cfg)))
        exit_.folder = None if shows else Path(cfg.run.dir)
        if shows and rank() != 0:
            return None
        planned = apply((pretend_ranks,), cfg) if shows else []
        if asked.plan:
            require(planned, f"--plan: not supported by {pipeline}")
            check_plan(cfg)
            return imported(plan, "torch")(cfg)
        require(bool(preview) or not asked.dry_run, f"--dry-run: not supported by {pipeline}")
        check(cfg)
        notices = continue_run(cfg, pipeline)
        if rank() == 0:
            warnings = unused_settings(cfg, load(pipeline, schema), chosen(pipeline, asked.overrides))
            for line in (*(f"notice: {line}" for line in notices), *(f"warning: {line}" for line in warnings)):
                tell(line)
        if asked.dry_run:
            return (imported(preview, "transformers") if isinstance(preview, str) else preview)(cfg)
        exit_.start()
        fetch_models(cfg.roles)
        run(cfg)
        gc.freeze()  # else the interpreter searches torch's modules for cycles on exit, for a second or more
    except KeyboardInterrupt:
        exit_.leave(130, "interrupted" if rank() == 0 else "")
    except Exception as error:  # noqa: BLE001 - the boundary of a rank: recorded, then the end of the process
        exit_.end(error)


def _evaluate(schema: type, argv: Sequence[str]) -> None:
    own, others = ({leaf.key for leaf in leaves(one)} for one in (schema, EvaluateConfig))
    idle = next((word for word in argv if word.lstrip("+~").partition("=")[0] in own - others - {"steps"}), None)
    if idle:
        Exit(None).fail(2, f"{idle}: has no effect with {NO_STEPS}, which evaluates and trains nothing; leave it out")
    return main("evaluate", EvaluateConfig, imported(EVALUATE), [*filter(NO_STEPS.__ne__, argv)])


def pretend_ranks(plan: PlanConfig) -> None:
    """Set a preview's number of ranks to `plan.ranks`."""
    if plan.ranks:
        os.environ["WORLD_SIZE"] = str(plan.ranks)


def imported(name: str, heavy: str = "") -> Callable[[Any], Any]:
    """Return the function `module:function`. heavy: name of a slow import to print."""
    module, _, function = name.partition(":")
    with phase(f"loading {heavy}", speaks=bool(heavy)):
        return getattr(importlib.import_module(module), function)


class Exit:
    """Error reporting and exit of this process."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._is_named = folder is not None
        self.started = False

    def start(self) -> None:
        """Mark the settings as good: later errors are the ranks'."""
        self.started = True
        path = self.folder / ERROR_FILE if self.folder else None
        if path and rank() == 0 and path.exists() and not fresh(path):
            path.unlink(missing_ok=True)

    def end(self, error: Exception) -> NoReturn:
        """Exit with an exception's code and lines; call it where that is handled."""
        if isinstance(error, Stopped):
            tell_torchrun(str(error))
            self.leave(error.code, str(error) if rank() == 0 else "")
        if isinstance(error, UserError | RunFailed):
            if isinstance(error, Disagreement) and rank() != 0:
                self.leave(2, "")
            self.fail(2 if isinstance(error, UserError) else 1, str(error), error.report)
        if full := full_disk(error):
            self.fail(2, f"disk full: {full.filename or self.folder}")
        if lost := lost_file(error, self.folder):
            self.fail(2, f"run.dir: {lost.filename}: {lost.strerror}", traceback.format_exc())
        tell(traceback.format_exc().rstrip(), lines=True)
        self.fail(1, one_line(error), traceback.format_exc(), printed=True)

    def fail(self, code: int, line: str, report: str = "", printed: bool = False) -> NoReturn:
        """Print `line` once for all ranks that fail alike, and exit.

        report: for torchrun, and for `error.txt` below the line. printed: stderr has it already.
        """
        line, report = printable(" ".join(line.split())), printable(report)
        # A start that fails before the run has a directory makes none under a name that the user has not chosen.
        folder = self.folder if self.folder and (self._is_named or self.folder.exists()) else None
        if (folder is None or not self.started) and local_rank() != 0:
            # All ranks of a node make the same mistake; local rank 0 prints it once, and torchrun ends the others.
            time.sleep(GRACE_SECONDS)
        tell_torchrun(report if printed else f"error: {line}")
        first = folder is None or record(folder, line, "" if printed else report)
        if report and first and folder:
            line += f" (more in {folder / ERROR_FILE})"
        self.leave(code, f"error: {line}" if first and not printed else "")

    def leave(self, code: int, line: str) -> NoReturn:
        """Print `line`, if any, and end the process."""
        sys.stdout.flush()
        if line:
            tell(line)
        sys.stderr.flush()
        if code > 128 and (launcher := os.environ.get(LAUNCHER)):
            # It ends torchrun, and exits with the same code, also on nodes that had no signal themselves.
            os.kill(int(launcher), code - 128)
        elif code == 2 or code > 128:
            forgo_restarts()
        if "torch" in sys.modules:
            # Destructors of a process group may wait for peers that are gone.
            os._exit(code)
        sys.exit(code)


def forgo_restarts() -> None:
    """End a restarting agent (`--max-restarts`): a restart corrects no user's mistake, and an asked end is final."""
    env = os.environ
    if int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")) > int(env.get("TORCHELASTIC_RESTART_COUNT", "0")):
        os.kill(os.getppid(), signal.SIGTERM)


def record(folder: Path, line: str, report: str = "") -> bool:
    """Write `folder/error.txt` unless another rank was first. Return False if that rank wrote the same line."""
    path, draft = folder / ERROR_FILE, folder / f"{ERROR_FILE}.{rank()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(f"{line}\n\n{report}" if report else line + "\n")
        try:
            # `link` fails if the file exists, and never shows a file that is written in part.
            os.link(draft, path)
        except FileExistsError:
            if fresh(path):
                return path.read_text().partition("\n")[0] != line
            # The file is from an earlier start, so this rank is the first of this one.
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError:
        # Without a writable directory the line on stderr must do.
        pass
    return True


def fresh(path: Path) -> bool:
    """Return True if a rank of this start wrote the file."""
    return path.stat().st_mtime >= BEGAN


def full_disk(error: BaseException | None) -> OSError | None:
    """Return the full disk's `OSError` that `error` is, or was raised from, if any."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None


def lost_file(error: BaseException, folder: Path | None) -> OSError | None:
    """Return the error if it is about a run directory's file, changed by another program."""
    is_ours = isinstance(error, OSError) and isinstance(error.filename, str) and folder is not None
    return error if is_ours and Path(error.filename).is_relative_to(folder) else None


def say(text: str) -> None:
    """Print a text on rank 0 alone."""
    if rank() == 0:
        print(text, end="")


def given_run_dir(pipeline: str, argv: Sequence[str]) -> Path | None:
    """Return `run.dir` of a possibly wrong command line with a literal `run.dir=` or `run.name=`."""
    given = {key.lstrip("+"): value.strip("'\"") for key, _, value in (word.partition("=") for word in argv)}
    name, folder = given.get("run.name", ""), given.get("run.dir")
    plain_words = "$" not in f"{name}{folder}"
    is_given = folder or (name and is_name(name))
    return run_dir(pipeline, name, folder) if plain_words and is_given else None


class _Parser(Parser):
    def __init__(self, pipeline: str, schema: type) -> None:
        super().__init__(names_of(pipeline)[0], add_help=False)
        self._schema = schema

    def error(self, message: str) -> NoReturn:
        raise UserError(self.told(message))

    def unknown(self, name: str, value: str) -> str:
        key = name.lstrip("-")
        return f"{name}: unknown option; settings are key=value: {suggestion(key, value, self._schema)}"


def names_of(pipeline: str) -> tuple[str, str]:
    """Return a pipeline's command and module; a user's own has its file's name."""
    ours = pipeline in PIPELINES
    return (program(pipeline), f"spmd_rl.{pipeline}") if ours else (f"python -m {pipeline}", pipeline)


def parse(pipeline: str, schema: type, argv: Sequence[str]) -> argparse.Namespace:
    """Parse overrides and Hydra's supported options."""
    parser = _Parser(pipeline, schema)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plan", action="store_true")
    # Hydra's users pass --resolve; the output of --cfg is always resolved.
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--multirun", "-m", action="store_true")
    asked = parser.parse_intermixed_args(list(argv))
    if asked.multirun:
        raise UserError("--multirun: not supported, a run is one torchrun; loop in the shell")
    return asked


HELP = """\
{about}

usage: {start} [option ...] [key=value ...]
       torchrun --nproc-per-node N -m {module} [option ...] [key=value ...]

options:
  --help                this text
  --dry-run             print the batch arithmetic, three prompts, their rewards and what would be written; run nothing
  --plan                print what a rank would hold and be sent in each phase, and whether it fits; run nothing
  --cfg job             print the composed settings, and run nothing
  --config-dir DIR      look for groups and YAML files in DIR too
  --config-name NAME    start from NAME.yaml, not {pipeline}.yaml

groups (group=option; +experiment=option):
{groups}

settings (key=value), with the values of this command line:
{settings}
"""


def help_text(pipeline: str, schema: type, run: Callable[[Any], None], asked: argparse.Namespace) -> str:
    """Return usage, groups, and every key with meaning and value under these overrides."""
    cfg = build(schema, compose(pipeline, asked.overrides, asked.config_dir, asked.config_name))
    about = (sys.modules[run.__module__].__doc__ or "").strip().partition("\n")[0]
    groups = "\n".join(f"  {name}: {', '.join(known)}" for name, known in options(CONFIGS).items())
    settings = "\n".join(f"  {e.key}={e.value}  ({e.type})\n      {e.doc}" for e in entries(schema, cfg))
    start, module = names_of(pipeline)
    return HELP.format(about=about, start=start, module=module, pipeline=pipeline, groups=groups, settings=settings)
