"""Lines of the package at one commit that stand nowhere in the tree of another: deleted, and not moved or reworded.

    python -m bench.deleted 2f475cb HEAD

Blank lines and comments do not count. A line has moved where the same text stands in another place; it was reworded
where a new line, taken for one old line alone, shares more than half of its words with it.
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict

THEMES = {
    "judge by falsified twins": r"sandbox/(claims|exam|expectations|falsify|literals|guest/(exam|standin))\.py",
    "loop files": r"(rlvr|agentic)(_\w+)?\.py",
    "two protocols of generating ranks": r"split/(?!publisher|engine_weights|kept|in_flight|replica_road|delta).*",
    "two roads of weights": r"(sync|split)/.*",
    "rollout": r"rollout/.*",
    "learn": r"learn/.*",
    "train, checkpoint": r"(train|checkpoint)/.*",
    "sandbox": r"sandbox/.*",
    "config": r"config/.*",
    "tools": r"(simulate|doctor|plan|view)/.*|(\w*audit|dry_run\w*|play|compare)\.py|track/(curve|report)\.py",
    "all others": r".*",
}
"""The first whose pattern a file's path matches."""


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.check_output(["git", *words], text=True)


def lines(commit: str) -> dict[str, list[str]]:
    """Lines that count, by file."""
    found = {}
    for file in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if file.endswith(".py"):
            stripped = (line.strip() for line in git("show", f"{commit}:{file}").splitlines())
            found[file] = [line for line in stripped if line and not line.startswith("#")]
    return found


def words(line: str) -> Counter[str]:
    """The words and signs of a line."""
    return Counter(re.findall(r"\w+|[^\w\s]", line))


def theme(file: str) -> str:
    """Of a file of the package."""
    path = file.removeprefix("spmd_rl/")
    return next(name for name, pattern in THEMES.items() if re.fullmatch(pattern, path))


def missing(before: dict[str, list[str]], after: dict[str, list[str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Lines of the package that stand nowhere now, with their files; and the lines that are new."""
    left = Counter(line for theirs in after.values() for line in theirs)
    for file, theirs in before.items():
        if not file.startswith("spmd_rl/"):
            left.subtract(theirs)
    gone = []
    for file, theirs in before.items():
        for line in theirs if file.startswith("spmd_rl/") else ():
            if left[line] > 0:
                left[line] -= 1
            else:
                gone.append((file, line))
    return gone, [line for line, count in left.items() for _ in range(max(0, count))]


def not_reworded(gone: list[tuple[str, str]], new: list[str]) -> list[str]:
    """Files of those lines that no new line is made of, a file for each line."""
    made, by_word, taken = [words(line) for line in new], defaultdict(list), set()
    for number, theirs in enumerate(made):
        for word in theirs:
            by_word[word].append(number)
    telling = {word: numbers for word, numbers in by_word.items() if len(word) > 2 and len(numbers) < 2000}
    kept = []
    for file, line in gone:
        own, scores = words(line), {}
        alike = Counter(number for word in own for number in telling.get(word, ()) if number not in taken)
        for number, _ in alike.most_common(60):
            scores[number] = (own & made[number]).total() / (own | made[number]).total()
        nearest = max(scores, key=scores.__getitem__, default=None)
        if nearest is not None and scores[nearest] >= 0.5:
            taken.add(nearest)
        else:
            kept.append(file)
    return kept


def main(before: str, after: str) -> None:
    """Print a row for each theme: lines before, those that stand nowhere now, and those not even reworded."""
    old, now = lines(before), lines(after)
    gone, new = missing(old, now)
    package = {file: theirs for file, theirs in old.items() if file.startswith("spmd_rl/")}
    counts = [Counter(dict.fromkeys(THEMES, 0)) for _ in range(3)]
    for file, theirs in package.items():
        counts[0][theme(file)] += len(theirs)
    counts[1].update(theme(file) for file, _ in gone)
    counts[2].update(theme(file) for file in not_reworded(gone, new))
    for name in THEMES:
        print(f"| {name} | " + " | ".join(f"{count[name]:,}" for count in counts) + " |")
    print("| all | " + " | ".join(f"{count.total():,}" for count in counts) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:3])
