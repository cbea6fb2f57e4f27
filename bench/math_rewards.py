"""Mathematics on real rows through a sidecar's two workers: what is right, what is not, and how fast.

    python -m bench.math_rewards [directory with gsm8k/ and deepmath/]

Each row's ground truth is judged in a box against itself (`gold`) and against the next row's, where they differ
(`pairs`); `mixed` times 10,000 rows, half of them right, each with a text of its own around the answer. `votes`
compares the votes of 2,000 pairs of DeepMath's answers with the reward: of two rows, and of one in two spellings.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from spmd_rl import sidecar
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.types import AnswerInfo, Message, Node, Prompt, Scorer, Verdict

WORKERS, AT_ONCE, ROWS = 2, 64, 10_000


def truths(directory: Path) -> list[str]:
    rows = [json.loads(line) for line in (directory / "deepmath/train.jsonl").read_text().splitlines()]
    found = [row["ground_truth"] for row in rows]
    for name in ("test", "train"):
        rows = [json.loads(line) for line in (directory / f"gsm8k/{name}.jsonl").read_text().splitlines()]
        found += [row["answer"].rpartition("####")[2].strip() for row in rows]
    return found


async def judge(scorer: Scorer, pairs: list[tuple[str, str]]) -> tuple[list[Verdict], float]:
    """Verdicts of (truth, final answer), and seconds."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, truth: str, final: str) -> Verdict:
        async with gate:
            prompt = Prompt(f"{number:032x}", (Message("user", "?"),), "math", truth)
            return await scorer.score(prompt, f"Step {number}.\nSo it is \\boxed{{{final}}}.", AnswerInfo(9, "stop"))

    start = time.perf_counter()
    verdicts = await asyncio.gather(*(one(number, *pair) for number, pair in enumerate(pairs)))
    return verdicts, time.perf_counter() - start


def tell(name: str, pairs: list[tuple[str, str]], verdicts: list[Verdict], expected: float, seconds: float) -> None:
    statuses = Counter(verdict.status for verdict in verdicts)
    print(f"{name}: {len(pairs)} in {seconds:.1f} s, {len(pairs) / seconds:.0f}/s; {dict(statuses)}")
    odd = Counter(
        (*pair, verdict.score if verdict.scored else verdict.status)
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if not verdict.scored or verdict.score != expected
    )
    print(f"  not {expected}: {sum(odd.values())}")
    for (truth, final, found), times in odd.most_common():
        print(f"    {times} x {truth!r} <- {final!r}: {found}")


def respelled(text: str) -> str:
    """The same mathematics as somebody else may write it."""
    for one, other in (("\\frac", "\\dfrac"), (" + ", "+"), ("\\left", ""), ("\\right", ""), ("^2", "^{2}")):
        text = text.replace(one, other)
    return f"{text}.0" if text.isdecimal() else f"\\,{text}\\, "


async def votes(scorer: Scorer, found: list[str]) -> None:
    chosen = random.Random(0).sample(found, 1001)
    pairs = [*zip(chosen, chosen[1:], strict=False), *((one, respelled(one)) for one in chosen[:1000])]
    verdicts, _ = await judge(scorer, pairs)
    cast = [(await judge(scorer, [("no truth of these", one) for one in side]))[0] for side in zip(*pairs, strict=True)]
    odd = [
        (*pair, verdict.score, one.answer[:60], other.answer[:60])
        for pair, verdict, one, other in zip(pairs, verdicts, *cast, strict=True)
        if (one.answer == other.answer) != (verdict.score == 1.0)
    ]
    print(
        f"votes: of {len(pairs)} pairs {sum(v.score == 1.0 for v in verdicts)} are equal; {len(odd)} vote otherwise",
        *odd,
        sep="\n    ",
    )


async def measure(scorer: Scorer, found: list[str]) -> None:
    gold = [(truth, truth) for truth in found]
    pairs = [(a, b) for a, b in zip(found, found[1:], strict=False) if a != b]
    half = ROWS // 2
    mixed = [pair for both in zip(gold[:half], [*pairs[:half]], strict=False) for pair in both]
    await judge(scorer, gold[:200])
    await votes(scorer, found[:4994])  # DeepMath's
    for name, asked, expected in (("gold", gold, 1.0), ("pairs", pairs, 0.0)):
        verdicts, seconds = await judge(scorer, asked)
        tell(name, asked, verdicts, expected, seconds)
    _, seconds = await judge(scorer, mixed)
    print(f"mixed: {len(mixed)} in {seconds:.1f} s, {len(mixed) / seconds:.0f} verdicts/s with {WORKERS} workers")


def main() -> None:
    found = truths(Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data"))
    reward = RewardConfig(target="rewards.math_verify:MathReward", workers=WORKERS)
    with tempfile.TemporaryDirectory(prefix="spmd-") as directory:
        node = Node(0, 0, f"ipc://{directory}/s/host.sock")
        with sidecar.connect(RewardsConfig(domains={"math": reward}), node) as scorer:
            asyncio.run(measure(scorer, found))


if __name__ == "__main__":
    main()
