"""Where two runs part, found in made-up files of them."""

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.distributed import Journal
from spmd_rl.tools import bisect
from tests.agent_run import bytes_tokenizer, make_agent_run


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return make_agent_run(tmp_path / "one", bytes_tokenizer(tmp_path / "model"), written=2)


@pytest.fixture
def other(one: Path) -> Path:
    return Path(shutil.copytree(one, one.parent / "other"))


def edit(path: Path, number: int, change) -> None:
    """Change one row of a file of samples."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[number])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def told(one: Path, other: Path, capsys, *words: str) -> str:
    code = bisect.main([str(one), str(other), *words])
    said = capsys.readouterr().out
    assert code == ("first difference" in said), said
    return said


def test_equal_runs(one: Path, other: Path, capsys) -> None:
    assert "no difference in 2 steps, 1 to 2" in told(one, other, capsys)


def test_a_sampled_token(one: Path, other: Path, capsys) -> None:
    path = other / "samples" / "step-000002.jsonl"
    row = json.loads(path.read_text().splitlines()[9])
    given = len(row["turns"][0]["prompt_ids"])
    edit(path, 9, lambda row: row["turns"][0]["token_ids"].__setitem__(3, 77))
    edit(path, 9, lambda row: row["turns"][0]["logprobs"].__setitem__(1, -9.5))
    said = told(one, other, capsys)
    assert f"step 2, generate: 17.1 tokens, token {given + 3} (id {row['turns'][0]['token_ids'][3]}, " in said
    assert said.rstrip().endswith(" | 77")
    assert "no difference in 1 step," in told(one, other, capsys, "--steps", "1")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda row: row["turns"][0]["logprobs"].__setitem__(0, -9.5), "generate: 8.0 logprobs, token "),
        (lambda row: row["verdict"].__setitem__("score", 9.5), "score: 8.0 verdict\n"),
        (lambda row: row.__setitem__("advantage", 9.5), "prepare: 8.0 advantage\n"),
    ],
)
def test_phases_in_order(one: Path, other: Path, capsys, change, where: str) -> None:
    edit(other / "samples" / "step-000001.jsonl", 0, change)
    assert f"first difference: step 1, {where}" in told(one, other, capsys)


def test_what_one_run_lacks_is_no_difference_but_a_sample_is(one: Path, other: Path, capsys) -> None:
    for path in (other / "samples").glob("eval-*"):
        path.unlink()
    assert "no difference" in told(one, other, capsys)
    path = other / "samples" / "step-000001.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))
    assert "step 1, generate: 15.7 tokens" in told(one, other, capsys)


def test_a_metric_and_a_setting(one: Path, other: Path, capsys) -> None:
    for name, old, new in (
        ("config.yaml", "seed: 0", "seed: 1"),
        ("metrics.jsonl", '"step":2,', '"step":2,"time/x":1,'),
    ):
        (other / name).write_text((other / name).read_text().replace(old, new))
    assert "seed: 0 | 1\n" in (said := told(one, other, capsys)) and "no difference" in said
    (other / "metrics.jsonl").write_text((one / "metrics.jsonl").read_text().replace('"step":2,', '"step":2,"a/b":1,'))
    assert "step 2, update: a/b\n  missing | 1" in told(one, other, capsys)


def hashed(run: Path, ranks: int = 1, **found: str) -> None:
    for rank in range(ranks):
        journal = Journal(run / "journal", rank)
        journal.hashes = True
        for update in (2, 10):
            journal.record(
                1, "update", f"policy {update}", lambda u=update: {f"{name}{u}": v for name, v in found.items()}
            )
        journal.close()


def test_hashes_of_tensors(one: Path, other: Path, capsys) -> None:
    hashed(one, a="1", b="2")
    assert "journal.hashes was not set in both" in told(one, other, capsys)
    hashed(other, a="0", b="0")
    # Of a step that was done again, the last line counts.
    hashed(other, a="1", b="3")
    assert "first difference: step 1, update: policy 2: b2, rank 0\n  2 | 3" in told(one, other, capsys)
    shutil.rmtree(other / "journal")
    hashed(other, ranks=2, a="7")
    said = told(one, other, capsys)
    assert "ranks or layouts differ" in said and "no difference" in said


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (["one", "none"], "none: not a run"),
        (["one", "model"], "not a run"),
        (["one", "other", "--steps", "7"], "have no step in common"),
    ],
)
def test_mistakes_are_one_line(one: Path, other: Path, capsys, runs: list[str], why: str) -> None:
    assert bisect.main([str(one.parent / word) if word.isalpha() else word for word in runs]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
