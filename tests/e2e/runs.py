"""Runs of the real door on a tiny random model: started, watched, killed, compared.

    run = Toy(tmp_path).start("steps=2", ranks=2)
    assert run.wait() == 0
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("policy.dtype=float32", "rollout.claim=static")
"""What guarantee E asks for."""


class Toy:
    """A tiny model, a toy data set and settings that make a step take well under a second."""

    def __init__(self, path: Path, kind: str = "llama", rows: int = 40) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.model = path / "model"
        if not self.model.exists():
            tiny(kind, self.model)
        self.data = path / "data.jsonl"
        lines = [{"prompt": f"say {i} {i * i}", "ground_truth": str(i), "domain": "toy"} for i in range(rows)]
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def settings(self) -> list[str]:
        """Overrides that every run of this toy shares."""
        return [
            f"policy.model={self.model}",
            f"data.train={self.data}",
            "data.format='{question}'",
            "reward.toy.target=tests.e2e.toy_reward:ParityReward",
            "rollout.prompts_per_step=4",
            "rollout.answers_per_prompt=4",
            "rollout.max_new_tokens=6",
            "eval.every=2",
            "eval.prompts=4",
            "eval.answers=2",
            "policy.lr=1e-3",
            "steps=4",
            "checkpoint.every=1",
            "journal.stall_seconds=60",
        ]

    def start(
        self, *overrides: str, ranks: int = 2, name: str = "run", script: Path | None = None, env: dict | None = None
    ) -> "Running":
        """Start `torchrun -m spmd_rl.rlvr` (or `script`), or plain `python -m` for `ranks=0`."""
        run_dir = self.path / name
        door = [str(script)] if script else ["-m", "spmd_rl.rlvr"]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks else []
        command = [sys.executable, *torchrun, *door, *self.settings(), f"run.dir={run_dir}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        output = open(self.path / f"{name}.out", "ab")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        return Running(process, run_dir, self.path / f"{name}.out")


class Running:
    """One started job."""

    def __init__(self, process: subprocess.Popen, run_dir: Path, output: Path) -> None:
        self.process, self.run_dir, self.output = process, run_dir, output
        self.began = time.time()

    def wait(self, timeout: float = 120) -> int:
        """The exit code; the whole job is killed when time runs out."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the job did not end in {timeout} s:\n{self.text()[-3000:]}") from None

    def text(self) -> str:
        """All it printed, over all starts of the same name."""
        return self.output.read_text(errors="replace")

    def events(self, rank: int) -> list[dict]:
        """The rank's journal since this start."""
        path = self.run_dir / "journal" / f"rank-{rank}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in events if e["t"] >= self.began - 1]

    def wait_for(self, phase: str, step: int, rank: int = 0, timeout: float = 90) -> None:
        """Until the rank's journal says that it entered `phase` in `step`."""
        deadline = time.time() + timeout
        while time.time() < deadline:
            if any(e["event"] == "enter" and e["phase"] == phase and e.get("step") == step for e in self.events(rank)):
                return
            assert self.process.poll() is None, f"ended before {phase} of step {step}:\n{self.text()[-3000:]}"
            time.sleep(0.005)
        raise AssertionError(f"never entered {phase} of step {step}")

    def family(self) -> list[psutil.Process]:
        """The agent's descendants, alive now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def pid(self, victim: str) -> int:
        """The process id of `agent`, `host` or `rank-N`."""
        if victim == "agent":
            return self.process.pid
        if victim == "host":
            return next(p.pid for p in self.family() if "spmd_rl.sidecar" in p.cmdline())
        rank = victim.removeprefix("rank-")
        return next(
            p.pid
            for p in self.family()
            if p.environ().get("RANK") == rank and "spmd_rl.sidecar" not in " ".join(p.cmdline())
        )

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def samples(self, step: int) -> list[dict]:
        """The lines of one step's sample log."""
        path = self.run_dir / "samples" / f"step-{step:06d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def weights(self, step: int) -> dict:
        """The exported weights of one step."""
        return load_file(self.run_dir / "checkpoints" / f"step-{step:06d}" / "hf" / "model.safetensors")


def gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of `processes` that still run after `seconds`."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
