"""Draws rows by difficulty and quality: the same subset for a seed on any machine, with a report of the shares.

    python -m spmd_rl pick zwhe99/DeepMath-103K --keys answer=final_answer --by difficulty --rows 5000 \\
        --domain math --out data/deepmath_5000.jsonl
    python -m spmd_rl pick rows.jsonl --pass-rate runs/evaluate/NAME --where 'pass_rate>0' 'pass_rate<1' --by pass_rate

Rows are ordered by a hash of seed and content, and each class of `--by` gives its first ones. So neither the machine,
the files' order nor further rows change which of two rows is preferred. Without `--out` nothing is written.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from math import floor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, plural, printable, reason, tell
from spmd_rl.config.sections.data import RewardConfig, sources
from spmd_rl.data.fields import BrokenRow, opened
from spmd_rl.data.hub import source_records
from spmd_rl.data.pictures import Folder
from spmd_rl.data.prompts import row_content
from spmd_rl.data.rows import Record, parse_rows
from spmd_rl.data.seeds import counter_seed
from spmd_rl.sidecar.support import find_unsupported
from spmd_rl.types import Message, Prompt

KEY = "data.train"
PASS_RATE = "pass_rate"
ALL = "all"
MAX_CLASSES = 50
CONDITION = re.compile(r"([\w.]+)\s*(!=|<=|>=|=|<|>)\s*(.*)")
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


class _Candidate(NamedTuple):
    content: str
    record: dict[str, Any]
    row: Record


def _condition(text: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function from a record to why it misses a condition, empty if not."""
    if not (found := CONDITION.fullmatch(text.strip())):
        raise UserError(f"--where: {text!r} is no condition; write COLUMN, one of {' '.join(COMPARISONS)}, VALUE")
    column, compare, wanted = found[1], COMPARISONS[found[2]], found[3]

    def refuse(record: Mapping[str, Any]) -> str:
        if column not in record:
            return f"no column {column}"
        pair = _number(record[column]), _number(wanted)
        return "" if compare(*(pair if None not in pair else (str(record[column]), wanted))) else f"not {text}"

    return refuse


def _number(value: Any) -> Fraction | None:
    try:
        return Fraction(str(value)) if not isinstance(value, bool) else None
    except (ValueError, ZeroDivisionError):
        return None


def _records(source: str) -> Iterator[tuple[str, Any, Folder]]:
    for name in sources(source):
        folder = Folder.of(name)
        yield from ((*found[:2], folder) for found in source_records(name, KEY))


def _pass_rates(run: Path, pass_score: float) -> dict[str, float]:
    files = sorted(run.glob("samples/eval-*.jsonl"))
    if not files:
        raise UserError(f"--pass-rate: {run} has no samples/eval-*.jsonl; python -m spmd_rl.evaluate writes it")
    passed: dict[str, list[bool]] = {}
    with files[-1].open("rb") as lines:
        for sample in map(json.loads, lines):
            # A greedy answer is no draw from the policy, and a failed verdict is no wrong answer.
            if not sample.get("greedy") and sample["verdict"]["status"] in ("ok", "wrong_format"):
                passed.setdefault(sample["id"], []).append(sample["verdict"]["score"] >= pass_score)
    return {id: fmean(found) for id, found in passed.items()}


def _candidates(asked: Any, left_out: Counter[str]) -> Iterator[_Candidate]:
    rates = _pass_rates(asked.pass_rate, asked.pass_score) if asked.pass_rate else {}
    conditions, seen, first = [*map(_condition, asked.where)], set(), ""
    columns = {name: None if column == "null" else column for name, column in map(_pair, asked.keys)}
    num_read = 0
    for where, given, folder in _records(",".join(asked.sources)):
        try:
            record, _ = opened(given, columns)
            record = {name: value for name, value in record.items() if name not in asked.drop}
            record |= {"domain": asked.domain} if asked.domain else {}
            without = {name: column for name, column in columns.items() if column is None}
            (row,) = parse_rows([(where, record)], KEY, without, folder)
        except (BrokenRow, UserError) as error:
            first = first or str(error)
            left_out["no valid row"] += 1
            continue
        num_read += 1
        content = row_content(row)
        if rates and (rate := rates.get(row.id or content)) is not None:
            record[PASS_RATE] = rate
        refusals = ["the problem of an earlier row" if content in seen else "", *(one(record) for one in conditions)]
        if asked.max_characters and sum(len(one.plain_text) for one in _messages(row)) > asked.max_characters:
            refusals.append(f"a problem of more than {asked.max_characters} characters")
        seen.add(content)
        if refused := next(filter(None, refusals), ""):
            left_out[refused] += 1
        else:
            yield _Candidate(content, _with_system(record, row, asked.system), row)
    if not num_read:
        raise UserError(first)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text}: must be NAME=VALUE")
    return name, value


def _messages(row: Record) -> Sequence[Message]:
    return (Message("user", row.problem),) if isinstance(row.problem, str) else row.problem


def _with_system(record: dict[str, Any], row: Record, system: str | None) -> dict[str, Any]:
    if system is None or not isinstance(row.problem, str):
        return record
    asked = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": row.problem}]}
    return asked | {name: value for name, value in record.items() if value != row.problem}


def _judged(found: Sequence[_Candidate], target: str, left_out: Counter[str]) -> list[_Candidate]:
    prompts = [Prompt(c.content, tuple(_messages(c.row)), "rows", c.row.ground_truth, c.row.extra) for c in found]
    refused = dict(find_unsupported(enumerate(prompts), {"rows": RewardConfig(target)}))
    left_out.update(f"unsupported by {target}: {why.partition(':')[0]}" for why in refused.values())
    return [one for i, one in enumerate(found) if i not in refused]


def _classes(found: Iterable[_Candidate], by: str | None, edges: Sequence[Fraction]) -> dict[str, list[_Candidate]]:
    by_class: dict[Any, list[_Candidate]] = {}
    for one in found:
        value = one.record.get(by, "") if by else ALL
        if value == "":
            raise UserError(f"--by: {one.row.where}: has no column {by}; --where '{by}!=' leaves such rows out")
        exact = _number(value)
        if edges and exact is None:
            raise UserError(f"--edges: {one.row.where}: {by} is {value!r}, not a number")
        key = sum(exact >= edge for edge in edges) if edges else str(value) if exact is None else exact
        by_class.setdefault(key, []).append(one)
    if len(by_class) > MAX_CLASSES:
        raise UserError(f"--by: {by} has {len(by_class)} values; --edges makes intervals of them")
    bounds = ["", *(f"{float(edge):g}" for edge in edges), ""]
    return {
        f"{bounds[key]}..{bounds[key + 1]}" if edges else f"{float(key):g}" if isinstance(key, Fraction) else key: rows
        for key, rows in sorted(by_class.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    }


def allot(available: Mapping[str, int], shares: Mapping[str, Fraction], rows: int) -> dict[str, int]:
    """Return the rows of each class by its share; if it has fewer, others get more."""
    drawn = dict.fromkeys(available, 0)
    open_, left = {name: share for name, share in shares.items() if share > 0}, min(rows, sum(available.values()))
    while open_ and left:
        quotas = {name: left * share / sum(open_.values()) for name, share in open_.items()}
        if full := [name for name in open_ if quotas[name] >= available[name]]:
            for name in full:
                drawn[name] = available[name]
                left -= drawn[name]
                del open_[name]
            continue
        drawn |= {name: floor(quota) for name, quota in quotas.items()}
        rest = left - sum(drawn[name] for name in open_)
        for name in sorted(open_, key=lambda name: (drawn[name] - quotas[name], name))[:rest]:
            drawn[name] += 1
        break
    return drawn


def _shares_of(text: str, available: Mapping[str, int]) -> dict[str, Fraction]:
    if text in ("equal", "proportional"):
        return {name: Fraction(1 if text == "equal" else count) for name, count in available.items()}
    given = dict(map(_pair, text.split(",")))
    if unknown := sorted(given.keys() - available.keys()):
        raise UserError(f"--shares: no row is of class {unknown[0]}; there are {', '.join(available)}")
    values = {name: _number(share) for name, share in given.items()}
    if bad := [name for name, share in values.items() if share is None or share < 0]:
        raise UserError(f"--shares: {bad[0]}={given[bad[0]]}: must be a number of at least 0")
    return {name: values.get(name) or Fraction(0) for name in available}


def _pick(asked: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    left_out = Counter[str]()
    found = list(_candidates(asked, left_out))
    num_read = len(found) + left_out.total()
    if asked.reward:
        found = _judged(found, asked.reward, left_out)
    by_class = _classes(found, asked.by, sorted(asked.edges))
    available = {name: len(rows) for name, rows in by_class.items()}
    drawn = allot(available, _shares_of(asked.shares, available), asked.rows or len(found))

    def place(one: _Candidate) -> tuple[int, str]:
        return counter_seed(asked.seed, "pick", one.content), one.content

    kept = [one for name, rows in by_class.items() for one in sorted(rows, key=place)[: drawn[name]]]
    total = len(kept) or 1
    report = {
        "sources": asked.sources,
        "seed": asked.seed,
        "read": num_read,
        "left_out": dict(left_out.most_common()),
        "by": asked.by,
        "classes": {
            name: {"available": available[name], "drawn": drawn[name], "share": round(drawn[name] / total, 4)}
            for name in available
        },
        "drawn": len(kept),
    }
    return [one.record for one in sorted(kept, key=place)], report


def _show(report: Mapping[str, Any]) -> None:
    print(f"{report['read']} rows of {printable(', '.join(report['sources']), lines=False)}")
    for why, count in report["left_out"].items():
        print(f"  {count} left out: {printable(why, lines=False)}")
    print(f"{plural(report['drawn'], 'row')} drawn with seed {report['seed']}, digest {report['digest']}")
    if report["by"]:
        print(f"  {report['by']:>16}  available   drawn   share")
        for name, row in report["classes"].items():
            print(f"  {printable(name, lines=False):>16}  {row['available']:9}  {row['drawn']:6}  {row['share']:6.1%}")


def _parser() -> Parser:
    made = Parser(program("pick"), description=__doc__.splitlines()[0])
    made.add_argument("sources", nargs="+", metavar="SOURCE", help="files, or datasets of the hub, as in data.train")
    made.add_argument(
        "--rows", type=at_least(1), metavar="N", help="number of rows to draw; default: all that are left"
    )
    made.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    made.add_argument("--by", metavar="COLUMN", help="column whose values are the classes, such as a difficulty")
    made.add_argument(
        "--edges", type=Fraction, nargs="+", default=[], metavar="X", help="classes are the intervals between"
    )
    made.add_argument("--shares", default="equal", metavar="SHARES", help="equal, proportional, or CLASS=SHARE,...")
    made.add_argument("--where", nargs="+", default=[], metavar="CONDITION", help="such as 'gpt_pass_percentage>=0.5'")
    made.add_argument("--max-characters", type=at_least(1), metavar="N", help="longest problem")
    made.add_argument("--reward", metavar="TARGET", help="leave out rows that this rewarder cannot judge")
    made.add_argument("--pass-rate", type=Path, metavar="RUN_DIR", help="evaluation that gives the column pass_rate")
    made.add_argument("--pass-score", type=float, default=1.0, metavar="X", help="score of a right answer; default 1")
    made.add_argument("--keys", nargs="+", default=[], metavar="NAME=COLUMN", help="as in data.keys; null for none")
    made.add_argument("--drop", nargs="+", default=[], metavar="COLUMN", help="columns that are not written")
    made.add_argument("--domain", metavar="NAME", help="domain of all rows")
    made.add_argument("--system", metavar="TEXT", help="system message before each problem")
    made.add_argument("--out", type=Path, metavar="PATH", help="JSON lines; the report is written beside them")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code: 2, after one line, for a mistake in it or the rows."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.out and asked.out.exists():
            raise UserError(f"--out: {asked.out} exists already")
        rows, report = _pick(asked)
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
        report["digest"] = blake2b(text, digest_size=16).hexdigest()
        if asked.out:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_bytes(text)
            asked.out.with_suffix(".report.json").write_text(json.dumps(report, indent=2) + "\n")
    except (OSError, UserError) as error:
        tell(f"error: {reason(error)}")
        return 2
    _show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
