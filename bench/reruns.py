"""Count the runs that end bitwise alike with several threads a rank, beside busy loops.

    python -m bench.reruns --times 10 --threads 2 --busy 2 [--only mixture-native] [--as-torch]

A tiny model trains for three steps. Then, as often as asked, the same run starts again, is killed (kill -9) in a phase
of its second step, a different one each time, and is started once more, which resumes it. Compared: every tensor of
every checkpoint with the moments, and every sample. --as-torch: without what `World.open` sets.
"""

import argparse
import re
import tempfile
import time
from pathlib import Path

from bench.threads import busy
from spmd_rl.checkpoint.manifest import Manifest
from tests.e2e.runs import EXACT, Running, Toy
from tests.engines import VLLM_SIZES
from tests.models import EXPERTS

CASES = {
    "dense-native": ("llama", "native"),
    "mixture-native": ("qwen3_moe", "native"),
    "dense-vllm": ("llama", "vllm"),
    "mixture-vllm": ("qwen3_moe", "vllm"),
}
"""Model and engine."""
SETTINGS = (
    *EXACT,
    "steps=3",
    "policy.lr=1e-4",
    "rollout.prompts_per_step=3",
    "rollout.answers_per_prompt=32",
    "rollout.max_new_tokens=8",
    "rollout.over_sample=0",
    "reward.toy.args.sleep=0.002",
)
POINTS = (
    "progress publish",
    "progress generate",
    "enter score",
    "collective prepare: samples",
    "collective update: backward of micro-batch 1/1",
    "collective update: gradient norm and averages",
    "progress save",
    "collective save: publish",
    "progress eval",
)
AS_TORCH = """
import runpy
import torch
torch.use_deterministic_algorithms = lambda *arguments, **keywords: None
runpy.run_module("spmd_rl.rlvr", run_name="__main__", alter_sys=True)
"""


class ThreadedToy(Toy):
    """A toy whose ranks have several threads."""

    def __init__(self, path: Path, kind: str, engine: str, threads: int, as_torch: bool) -> None:
        super().__init__(path, kind, **VLLM_SIZES, **EXPERTS.get(kind, {}))
        self._engine, self._threads, self._script = engine, str(threads), path / "as_torch.py" if as_torch else None
        if self._script:
            self._script.write_text(AS_TORCH)

    def settings(self) -> list[str]:
        return [*super().settings(), f"engine={self._engine}", *SETTINGS]

    def start(self, *overrides: str, env: dict | None = None, script: Path | None = None, **how) -> Running:
        env = {**(env or {}), "OMP_NUM_THREADS": self._threads}
        return super().start(*overrides, env=env, script=script or self._script, **how)


def results(run: Running, step: int) -> tuple[dict[str, str], list[dict]]:
    """Return hashes of all tensors that the run saved after a step, and the step's samples."""
    files = Manifest.read(run.run_dir / "checkpoints" / f"step-{step:06d}").files
    # state.json has times
    return {name: entry.hash for name, entry in files.items() if name != "state.json"}, run.samples(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name matches")
    parser.add_argument("--as-torch", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    for case in filter(re.compile(options.only).search, CASES):
        with tempfile.TemporaryDirectory() as folder, busy(options.busy):
            begin = time.time()
            toy = ThreadedToy(Path(folder), *CASES[case], options.threads, options.as_torch)
            first = toy.run(name="first", ranks=options.ranks)
            expected = [results(first, step) for step in (1, 2, 3)]
            again = resumed = 0
            for i in range(options.times):
                point, how = POINTS[i % len(POINTS)], {"name": f"run-{i}", "ranks": options.ranks}
                run = toy.linger(point, **how)
                run.wait_for(point)
                run.kill()
                run.wait()
                again += results(run, 1) == expected[0]
                run = toy.run(**how)
                resumed += [results(run, step) for step in (1, 2, 3)] == expected
                print(f"{case}: {i + 1} killed at {point!r}: {again} reruns and {resumed} resumes alike", flush=True)
            print(
                f"| {case} | {again} of {options.times} | {resumed} of {options.times} | {time.time() - begin:.0f} s |"
            )


if __name__ == "__main__":
    main()
