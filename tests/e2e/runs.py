"""Runs of the real door on a tiny random model: started, watched, killed, compared.

run = Toy(tmp_path).start("steps=2", ranks=2)
assert run.wait() == 0
"""

import contextlib
import json
import os
import runpy
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from tests.forked import Forked, new_store, rank_environments
from tests.models import tiny
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("policy.dtype=float32", "rollout.claim=static")
"""What guarantee E asks for."""
LINGERING = ROOT / "tests" / "e2e" / "lingering_rlvr.py"
MARK = "SPMD_RL_TEST_RUN"
"""Environment variable that every process of a run inherits: how those that outlive it are found."""


class Toy:
    """A tiny model, a toy data set and settings that make a step take well under a second."""

    door = "spmd_rl.rlvr"

    def __init__(self, path: Path, kind: str = "llama", rows: int = 40, **sizes: object) -> None:
        """`sizes` of the model: see `tiny`."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.model = path / "model"
        if not self.model.exists():
            tiny(kind, self.model, **sizes)
        self.data = path / "data.jsonl"
        lines = [{"prompt": f"say {i} {i * i}", "ground_truth": str(i), "domain": "toy"} for i in range(rows)]
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def settings(self) -> list[str]:
        """Overrides that every run of this toy shares."""
        return [
            f"policy.model={self.model}",
            f"data.train={self.data}",
            "reward.toy.target=tests.e2e.toy_reward:ParityReward",
            "rollout.prompts_per_step=4",
            "rollout.answers_per_prompt=4",
            "rollout.max_new_tokens=6",
            "eval.every=2",
            "eval.prompts=4",
            "eval.answers=2",
            "policy.lr=1e-3",
            "policy.dtype=bfloat16",
            "algorithm=grpo_dynamic",
            "rollout.over_sample=2",
            "steps=4",
            "checkpoint.every=1",
            "checkpoint.keep=9",
            "checkpoint.export_hf=true",
            "journal.stall_seconds=60",
        ]

    def start(
        self,
        *overrides: str,
        ranks: int = 2,
        name: str = "run",
        script: Path | None = None,
        env: dict | None = None,
        torchrun: bool = False,
    ) -> "Running":
        """Start `spmd_rl.rlvr` (or `script`) on so many ranks, or as plain `python -m` for `ranks=0`.

        Its processes are forked from the tests' server (see `tests/forked.py`) with the variables that torchrun would
        set, and nobody ends them but they themselves. `torchrun=True`: each has an interpreter of its own, under an
        agent where there are ranks.
        """
        run_dir = self.path / name
        mark = secrets.token_hex(8)
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark, **(env or {})}
        door = str(script) if script else self.door
        arguments = [*self.settings(), f"run.dir={run_dir}", *overrides]
        output = self.path / f"{name}.out"
        if torchrun:
            agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks else []
            command = [sys.executable, *agent, *([door] if script else ["-m", door]), *arguments]
            with open(output, "ab") as out:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True
                )
            return Running([process], run_dir, output, mark, agent=bool(ranks))
        store = new_store() if ranks else None
        places = rank_environments(store, ranks) if ranks else [{}]
        forked = [Forked(output, os.environ | environment | place, _door, door, arguments) for place in places]
        return Running(forked, run_dir, output, mark, store=store)

    def run(self, *overrides: str, **how) -> "Running":
        """Start, and wait for a good end."""
        run = self.start(*overrides, **how)
        assert run.wait() == 0, run.text()[-3000:]
        return run

    def linger(self, point: str, *overrides: str, step: int = 2, env: dict | None = None, **how) -> "Running":
        """Start a run that lingers at `point` of the step; see `lingering_rlvr.py`."""
        at = {"LINGER": point, "LINGER_STEP": str(step), "LINGER_PIPELINE": self.door.rpartition(".")[2]}
        return self.start(*overrides, script=LINGERING, env={**at, **(env or {})}, **how)


def _door(door: str, arguments: list[str]) -> None:
    """What `python -m door` or `python door.py` does, in a process that was forked."""
    os.setsid()
    for name in [name for name in sys.modules if name.partition(".")[0] == "spmd_rl"]:
        del sys.modules[name]  # some of ours look at the clock and the environment when they are imported
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv = [door, *arguments]
    if door.endswith(".py"):
        runpy.run_path(door, run_name="__main__")
    else:
        runpy.run_module(door, run_name="__main__", alter_sys=True)


class Running:
    """One started job."""

    def __init__(
        self,
        started: list[Any],
        run_dir: Path,
        output: Path,
        mark: str,
        agent: bool = False,
        store: Any = None,
    ) -> None:
        self.started, self.run_dir, self.output = started, run_dir, output
        """`started`: the agent alone, or each rank; `subprocess.Popen` or `Forked`."""
        self._mark, self._agent, self._store = mark, agent, store

    @property
    def process(self) -> Any:
        """The first process of the job: the agent, or rank 0."""
        return self.started[0]

    def wait(self, timeout: float = 120) -> int:
        """The exit code, of forked ranks the first that is not 0; all are killed when time runs out."""
        deadline = time.time() + patient(timeout)
        while any(process.poll() is None for process in self.started):
            if time.time() > deadline:
                for process in self.processes():
                    process.kill()
                raise AssertionError(f"the job did not end in {timeout} s:\n{self.text()[-3000:]}")
            time.sleep(0.01)
        return next((code for process in self.started if (code := process.poll())), 0)

    def text(self) -> str:
        """All it printed, over all starts of the same name."""
        return self.output.read_text(errors="replace")

    def events(self, rank: int) -> list[dict]:
        """The rank's journal."""
        path = self.run_dir / "journal" / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, point: str, step: int = 2, rank: int = 0, timeout: float = 90) -> None:
        """Until the rank's journal has `point` (as in `lingering_rlvr.py`) in `step`."""
        event, _, what = point.partition(" ")
        deadline = time.time() + patient(timeout)
        while time.time() < deadline:
            for e in self.events(rank)[-20:]:
                if e["event"] == event and what in (e.get("phase"), e.get("name")) and e["step"] == step:
                    return
            assert any(process.poll() is None for process in self.started), (
                f"ended before {point} of step {step}:\n{self.text()[-3000:]}"
            )
            time.sleep(0.005)
        raise AssertionError(f"never came to {point} of step {step}")

    def processes(self) -> list[psutil.Process]:
        """Every process of the run that is alive now, whoever its parent is."""
        ours, found = {process.pid for process in self.started if process.poll() is None}, []
        for process in psutil.process_iter():
            try:
                marked = process.pid in ours or process.environ().get(MARK) == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def pid(self, victim: str) -> int:
        """The process id of `agent`, `rank-N`, or the sidecar's `host` or `worker`."""
        if victim.startswith("rank-") and not self._agent:
            return self.started[int(victim[5:])].pid
        if victim == "agent":
            assert self._agent, "forked ranks have none: start(..., torchrun=True)"
            return self.process.pid
        module = {"host": "spmd_rl.sidecar", "worker": "spmd_rl.sidecar.forkserver"}.get(victim)
        for process in self.processes():
            words = process.cmdline()
            if victim == "worker" and module in words and module in process.parent().cmdline():
                return process.pid  # a fork of the fork server
            if victim == "host" and module in words:
                return process.pid
            if module is None and process.ppid() == self.process.pid and f"rank-{process.environ()['RANK']}" == victim:
                return process.pid
        raise AssertionError(f"there is no {victim}")

    def kill(self) -> None:
        """Kill -9 every process of the run; some end by themselves when others do."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def outlived(self, seconds: float = 2.0) -> list[list[str]]:
        """Command lines of the processes that are still there `seconds` after now."""
        deadline = time.time() + patient(seconds)
        while (left := self.processes()) and time.time() < deadline:
            time.sleep(0.05)
        return [process.cmdline() for process in left]

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def samples(self, step: int) -> list[dict]:
        """The sample log of one step without the surplus, of which a step finishes as much as it happens to."""
        path = self.run_dir / "samples" / f"step-{step:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row for row in rows if row["reject_reason"] != "surplus"]

    def weights(self, step: int) -> dict:
        """The exported weights of one step."""
        return load_file(self.run_dir / "checkpoints" / f"step-{step:06d}" / "hf" / "model.safetensors")
