"""The judge of code by its cases: cheats paid (family x shape), right answers by set, verdicts that differ, and speed.

python -m bench.judge cheats 3 forkserver    # every cheat three times; or bwrap
python -m bench.judge right 1 bwrap          # with the reasons why rows are unsupported
python -m bench.judge flaky 5 forkserver     # a sample beside two busy loops
python -m bench.judge speed 4 forkserver     # verdicts per second of processor time, by shape
python -m bench.judge rows 1 forkserver /tmp/mine.txt    # a file of rows and answers, as tests/unit/sandbox/cases
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rewards.code import CodeReward
from spmd_rl.sandbox import open_sandbox
from tests.unit.sandbox.cases import FOLDER, Case, cheats, right_answers, rows, table

ROWS = {"never": "error|0", "rows": "0|error", "stdin_cheats": "0"}
BUSY = "import os\nos.nice(10)\nwhile True: pass"


def all_cheats(shapes_each: int) -> list[Case]:
    """Return the cheats of all files, without the right answers among them."""
    found = cheats(shapes_each) + [case for name, default in ROWS.items() for case in rows(name, default)]
    return [case for case in found if case.kind[1] != "right"]


def show_cheats(reward: CodeReward, times: int) -> None:
    """Print how many are paid, each tried so many times."""
    found = [(case, case.judge(reward)[0]) for _ in range(times) for case in all_cheats(2)]
    print(table((case, verdict) for case, verdict in found))
    print("\npaid:", sorted({case.id for case, verdict in found if verdict == "1"}))
    print("verdicts:", json.dumps(Counter(verdict for _, verdict in found)))


def show_right(reward: CodeReward, times: int) -> None:
    """Print the verdicts on right answers, by set, each as the gold answer of its row."""
    sets = {path.stem: rows(f"right/{path.stem}", "1", gold=True) for path in sorted((FOLDER / "right").glob("*.txt"))}
    sets |= {"table": right_answers(), "beyond": rows("beyond", "1", gold=True)}
    reasons: Counter[str] = Counter()
    print("| set | answers | 1 | unsupported | 0, error, timeout |\n|---|---|---|---|---|")
    for name, cases in sets.items():
        found = [case.judge(reward) for _ in range(times) for case in cases]
        count = Counter(verdict for verdict, _ in found)
        reasons.update(why for verdict, why in found if verdict == "unsupported")
        others = len(found) - count["1"] - count["unsupported"]
        print(f"| {name} | {len(found)} | {count['1']} | {count['unsupported']} | {others} |")
    print(*(f"{number} {reason:.150}" for reason, number in reasons.most_common()), sep="\n")


def show_rows(reward: CodeReward, times: int) -> None:
    """Print of a file of rows how many cheats are paid, which, and why the rest of them tells nothing: rows that are
    unsupported, and rows whose honest answer is not 1."""
    found = [(case, *case.judge(reward)) for _ in range(times) for case in rows(sys.argv[4], "0|error")]
    honest = [each for each in found if each[0].kind[1] == "right"]
    cheats_ = [each for each in found if each[0].kind[1] != "right"]
    print(table((case, verdict) for case, verdict, _ in cheats_))
    for title, chosen in (
        ("paid", [each for each in cheats_ if each[1] == "1"]),
        ("unsupported", [each for each in found if each[1] == "unsupported"]),
        ("honest answers that are not paid", [each for each in honest if each[1] not in ("1", "unsupported")]),
        ("cheats without a score", [each for each in cheats_ if each[1] in ("error", "timeout")]),
    ):
        print(
            f"\n{title}: {len(chosen)}",
            *(f"{case.id}: {verdict} {why}"[:200] for case, verdict, why in chosen),
            sep="\n",
        )


def show_flaky(reward: CodeReward, times: int) -> None:
    """Print which verdicts of a sample differ between runs beside two busy loops."""
    sample = all_cheats(1)[::9] + right_answers()[::9]
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        found = [{case.judge(reward)[0] for _ in range(times)} for case in sample]
    finally:
        for loop in loops:
            loop.kill()
    flaky = [case.id for case, verdicts in zip(sample, found, strict=True) if len(verdicts) > 1]
    print(f"{len(sample)} cases {times} times: {len(flaky)} flaky {flaky}")


def show_speed(reward: CodeReward, times: int) -> None:
    """Print verdicts per second of processor time, ours and of all that runs below us, by shape."""
    shapes: dict[str, list[Case]] = {}
    for case in right_answers():
        shapes.setdefault(case.kind[0], []).append(case)

    def used() -> float:
        """Our processor time, and that of the sandbox's process with all that it has reaped."""
        words = Path(f"/proc/{sandbox.process.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")

    for name, cases in shapes.items():
        cases = cases[:12]
        before, begun = used(), time.monotonic()
        for case in cases * times:
            case.judge(reward)
        number = len(cases) * times
        wall = number / (time.monotonic() - begun)
        print(f"{name:24} {number / max(used() - before, 1e-9):8.1f} a CPU second {wall:8.1f} a second")


if __name__ == "__main__":
    what, times, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sandbox = open_sandbox(name, "sandbox")
    seconds = 60.0 if what == "right" else 20.0
    globals()[f"show_{what}"](CodeReward(sandbox, seconds=2 if what == "cheats" else 4, total_seconds=seconds), times)
    sandbox.close()
