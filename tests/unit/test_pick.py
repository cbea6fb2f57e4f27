"""`pick`: the drawn subset, its shares, and what it leaves out."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from spmd_rl.tools.pick import allot, main


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(number: int = 60) -> list[dict]:
    return [{"question": f"{i}?", "answer": str(i), "level": ["easy", "hard", "mid"][i % 3 if i % 2 else 0]}
            for i in range(number)]  # fmt: skip


def picked(path: Path, *options: str) -> tuple[list[dict], dict]:
    out = path.with_name(f"out-{len(list(path.parent.iterdir()))}.jsonl")
    assert main([str(path), *options, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()], json.loads(
        out.with_suffix(".report.json").read_text()
    )


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.removeprefix("error: ").strip()


def test_the_same_rows_for_a_seed_in_any_order_of_the_file_and_any_process(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows()[::-1])
    drawn, report = picked(path, "--rows", "9", "--by", "level", "--seed", "5")
    assert picked(other, "--rows", "9", "--by", "level", "--seed", "5")[0] == drawn
    assert picked(path, "--rows", "9", "--by", "level", "--seed", "6")[0] != drawn
    assert [row["drawn"] for row in report["classes"].values()] == [3, 3, 3] and report["drawn"] == len(drawn) == 9
    assert report["digest"] == "d1f58ef99bce4d50c44d438bb9e23d7c", "a hash of these bytes, which no machine may change"
    command = [sys.executable, "-m", "spmd_rl", "pick", str(path), "--rows", "9", "--by", "level", "--seed", "5"]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": "3"}, check=True)
    assert report["digest"] in said.stdout
    more, _ = picked(write(tmp_path / "c.jsonl", rows(90)), "--rows", "9", "--by", "level", "--seed", "5")
    old = {row["question"] for row in drawn}
    assert [q for q in (row["question"] for row in more) if q in old] == [
        q for q in (row["question"] for row in drawn) if q in {row["question"] for row in more}
    ], "further rows do not change the order of others"


def test_what_is_left_out_and_why(tmp_path: Path) -> None:
    given = [*rows(4), {"question": "0?", "answer": "9", "level": "easy"}, {"question": "", "answer": "1"}]
    given += [{"question": "long " * 50, "answer": "1", "level": "easy"}, {"question": "no level?", "answer": "1"}]
    drawn, report = picked(write(tmp_path / "a.jsonl", given), "--where", "level!=hard", "--max-characters", "99")
    assert report["left_out"] == {
        "not level!=hard": 1, "the problem of an earlier row": 1, "no valid row": 1,
        "a problem of more than 99 characters": 1, "no column level": 1,
    }  # fmt: skip
    assert (report["read"], len(drawn)) == (8, 3)
    rated = write(tmp_path / "b.jsonl", [{"question": f"{x}?", "answer": "1", "d": x} for x in ("4.5", 5, "10", 3.5)])
    assert {row["d"] for row in picked(rated, "--where", "d>4.5", "d<=10.0")[0]} == {5, "10"}


def test_columns_domain_and_system_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"task": "1 + 1?", "final": 2, "r1": "long", "difficulty": 3.0}])
    keys = ("--keys", "question=task", "answer=final", "--drop", "r1", "--domain", "math", "--system", "Be brief.")
    (row,), _ = picked(path, *keys)
    assert row == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
        "difficulty": 3.0, "answer": 2, "domain": "math",
    }  # fmt: skip


def test_classes_by_edges_and_by_shares(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": "1", "d": i / 10} for i in range(100)])
    _, report = picked(path, "--by", "d", "--edges", "8", "2", "--rows", "40", "--shares", "..2=1,2..8=2,8..=1")
    assert {name: row["drawn"] for name, row in report["classes"].items()} == {"..2": 10, "2..8": 20, "8..": 10}
    _, report = picked(path, "--by", "d", "--edges", "2", "8", "--rows", "10", "--shares", "proportional")
    assert [row["share"] for row in report["classes"].values()] == [0.2, 0.6, 0.2]


def test_a_class_gives_all_it_has_and_the_others_the_rest() -> None:
    third = dict.fromkeys("abc", Fraction(1))
    assert allot({"a": 2, "b": 50, "c": 50}, third, 31) == {"a": 2, "b": 15, "c": 14}
    assert allot({"a": 2, "b": 3, "c": 4}, third, 99) == {"a": 2, "b": 3, "c": 4}
    assert allot({"a": 9, "b": 9, "c": 9}, third | {"c": Fraction(0)}, 4) == {"a": 2, "b": 2, "c": 0}
    assert allot({"a": 10, "b": 10, "c": 10}, third, 10) == {"a": 4, "b": 3, "c": 3}


def test_the_pass_rate_of_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": f"{i}?", "answer": "1", "id": str(i)} for i in range(4)])
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    scores = {"0": [1.0, 1.0], "1": [1.0, 0.0], "2": [0.0, 0.0], "3": []}
    lines = [{"id": id, "verdict": {"status": "ok", "score": s}} for id, found in scores.items() for s in found]
    lines += [{"id": "2", "verdict": {"status": "ok", "score": 1.0}, "greedy": True}]
    lines += [{"id": "3", "verdict": {"status": "timeout", "score": 0.0}}]
    write(samples / "eval-000000.jsonl", lines)
    rate = ("--pass-rate", str(tmp_path / "run"))
    drawn, report = picked(path, *rate, "--where", "pass_rate>0", "pass_rate<1")
    assert [(row["id"], row["pass_rate"]) for row in drawn] == [("1", 0.5)]
    assert report["left_out"] == {"not pass_rate<1": 1, "not pass_rate>0": 1, "no column pass_rate": 1}


def test_rows_that_a_rewarder_cannot_judge(tmp_path: Path) -> None:
    good = {"question": "Double x.", "test": "from solution import f\ndef test_f():\n    assert f(1) == 2\n"}
    bad = {"question": "Write a file.", "test": "from solution import f\ndef test_f(tmp_path):\n    f(tmp_path)\n"}
    drawn, report = picked(write(tmp_path / "a.jsonl", [good, bad]), "--reward", "rewards.code:CodeReward")
    assert [row["question"] for row in drawn] == ["Double x."]
    assert report["left_out"] == {"unsupported by rewards.code:CodeReward: process": 1}


def test_one_line_for_each_mistake(tmp_path: Path, capsys) -> None:
    path = str(write(tmp_path / "a.jsonl", rows()))
    assert refused(capsys, path, "--where", "level") == (
        "--where: 'level' is no condition; write COLUMN, one of = != < <= > >=, VALUE"
    )
    assert refused(capsys, path, "--by", "difficulty").startswith(f"--by: {path}:1: has no column difficulty")
    assert refused(capsys, path, "--by", "answer") == "--by: answer has 60 values; --edges makes intervals of them"
    assert refused(capsys, path, "--by", "level", "--edges", "1").endswith("level is 'easy', not a number")
    assert refused(capsys, path, "--by", "level", "--shares", "x=1").startswith(
        "--shares: no row is of class x; there "
    )
    assert "no samples/eval-*.jsonl" in refused(capsys, path, "--pass-rate", str(tmp_path))
    assert refused(capsys, path, "--out", path) == f"--out: {path} exists already"
    assert "needs `question`" in refused(capsys, path, "--drop", "question")
    assert "cannot read" in refused(capsys, f"{path}.none")
