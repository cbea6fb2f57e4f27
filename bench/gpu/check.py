"""Say whether this project computes right on this card: a table, and a file of figures. `make gpu-check`, minutes.

    python -m bench.gpu.check [--only kernels demo] [--dir runs/gpu-check]

Each item is a process with a limit, so that one that fails or hangs costs no other one. Its output is in
DIR/NAME.log, all figures are in DIR/gpu.jsonl. Exit code 1 if an item failed. `GPU_TESTS=rehearse` checks the CPU, with
small shapes.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench import show
from spmd_rl.model.smollm2 import default_dir, is_complete
from tests.gpu.machine import DEVICE, REHEARSED, ROOT
from tests.patience import patient

TESTS = ("-m", "pytest", "-o", "addopts=", "-q", "-s", "-ra", "-m", "gpu", "--tb=short", "tests/gpu")
DEMO = ("-m", "spmd_rl.rlvr", "+experiment=demo", "steps=2", "seed=1", "eval.every=0", "checkpoint.every=2")
EXACT = ("policy.dtype=float32", "rollout.claim=static", "train.deterministic=true")
ITEMS = {
    "doctor": (120, ("-m", "spmd_rl", "doctor")),
    "ceilings": (60, ("-m", "bench.gpu.ceilings")),
    "kernels and gradients": (120, (*TESTS, "-k", "varlen or rotary or logprob_head or hybrid")),
    "offload": (120, (*TESTS, "-k", "round_trips or checksums")),
    "two steps": (240, (*TESTS, "-k", "two_steps")),
    "publish": (120, (*TESTS, "-k", "a_publish")),
    "decoding": (240, (*TESTS, "-k", "our_own_decoding")),
    "updates": (600, (*TESTS, "-k", "test_3 and not speed_of_decoding")),
    "demo": (150, (*TESTS, "-k", "demo_learns")),
    "run": (150, (*DEMO, *EXACT, "run.dir={dir}/run")),
    "rerun": (150, (*DEMO, *EXACT, "run.dir={dir}/rerun")),
    "bitwise": (30, ("-m", "bench.gpu.same", "{dir}/run", "{dir}/rerun")),
    "vllm": (300, (*TESTS, "-k", "leans_on and llama")),
}
"""Name -> limit in seconds, arguments of Python; `{dir}` is the folder of the results."""
OF_SMOLLM2 = ("demo", "run", "rerun", "bitwise")
"""Items that need the demo's model: `python -m spmd_rl smollm2` fetches it."""


def check(name: str, folder: Path) -> tuple[str, float]:
    """Run an item; return how it ended and its seconds."""
    if name in OF_SMOLLM2 and not is_complete(default_dir()):
        return "skipped: no SmolLM2", 0.0
    limit, arguments = patient(ITEMS[name][0]), [word.format(dir=folder) for word in ITEMS[name][1]]
    log, began = folder / f"{name.replace(' ', '_')}.log", time.monotonic()
    env = os.environ | {"OUT": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with open(log, "w") as out:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(limit)
            ended = "ok" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            ended = f"FAILED (took more than {limit:g} s)"
        finally:  # an item's own processes end with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    if ended != "ok":
        print(*(f"    {line[:200]}" for line in text.splitlines()[-15:]), sep="\n", flush=True)
    elif arguments[1] == "pytest" and " passed" not in text.rstrip().rpartition("\n")[2]:
        ended = "skipped"
    return ended, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM", help=", ".join(ITEMS))
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/gpu-check")
    options = parser.parse_args()
    if DEVICE is None:
        sys.exit("error: torch finds no accelerator: python -m spmd_rl doctor; GPU_TESTS=rehearse checks the CPU")
    folder = options.dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = []
    for name in options.only:
        print(f"{name} ...", flush=True)
        ended, took = check(name, folder)
        table.append((name, ended, f"{took:.1f}"))
    for line in (folder / "gpu.jsonl").read_text().splitlines() if (folder / "gpu.jsonl").exists() else ():
        row = json.loads(line)
        print(f"{row.pop('what'):14}", " ".join(f"{key}={value}" for key, value in row.items()))
    show.table("A rehearsal on the CPU" if REHEARSED else "This card", ("", "", "s"), table)
    sys.exit(any(ended.startswith("FAILED") for _, ended, _ in table))


if __name__ == "__main__":
    main()
