"""Files of rows: JSON lines, JSON arrays, gzip and parquet, told apart by their first bytes."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.data import files, sources
from spmd_rl.data.rows import read_rows

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1), "level": i} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("content", "places"),
    [
        (LINES, [":1", ":2", ":3"]),
        (gzip.compress(LINES), [":1", ":2", ":3"]),
        (json.dumps(ROWS).encode(), ["[0]", "[1]", "[2]"]),
        (b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=2).encode(), ["[0]", "[1]", "[2]"]),
        (gzip.compress(json.dumps(ROWS, indent=2).encode()), ["[0]", "[1]", "[2]"]),
    ],
)
def test_the_same_rows_in_every_format_whatever_the_name(tmp_path: Path, content: bytes, places: list[str]) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    rows = list(read_rows(path, "data.train"))
    assert [(row.problem, row.ground_truth, row.extra["level"]) for row in rows] == [
        (row["question"], row["answer"], row["level"]) for row in ROWS
    ]
    assert [row.where for row in rows] == [f"{path}{place}" for place in places]


def test_parquet_and_its_nulls(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [
        {"question": "1 + 1?", "answer": "2", "messages": None, "tags": ["a", None]},
        {"question": None, "answer": "4", "messages": [{"role": "user", "content": "2 + 2?"}], "tags": None},
    ]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_rows(tmp_path / "a.parquet", "data.train")
    assert (first.problem, first.extra) == ("1 + 1?", {"tags": ["a", None]})
    assert (second.problem[0].content, second.extra) == ("2 + 2?", {})
    assert second.where == f"{tmp_path}/a.parquet[1]"
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"^data.eval: .*cut.parquet is broken parquet: "):
        list(read_rows(tmp_path / "cut.parquet", "data.eval"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a").write_bytes(b"PAR1 and more")
    with pytest.raises(UserError, match=r"^data.train: .*/a is parquet, which needs pyarrow: pip install 'spmd-rl\[d"):
        list(read_rows(tmp_path / "a", "data.train"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (gzip.compress(LINES)[:-9], "data.train: {path}: broken gzip: "),
        (b"\x1f\x8bnot gzip", "data.train: {path}: broken gzip: "),
        (b"[]", "data.train: {path} has no rows"),
        (b"[1]", "data.train: {path}[0]: not an object but a number"),
        (b'[{"question": "a", "answer": "1"}', "data.train: {path}: not JSON: "),
        (b"\x28\xb5\x2f\xfd", "data.train: {path}:1: not UTF-8, and neither gzip nor parquet"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_rows(path, "data.train"))
    assert str(caught.value).startswith(line.format(path=path)) and "\n" not in str(caught.value)


def test_patterns_stand_for_files_and_names_of_the_hub_do_not(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "c.txt"):
        (tmp_path / name).touch()
    given = f"{tmp_path}/*.parquet, openai/gsm8k:main:train[:10],reasoning_gym:chain_sum,{tmp_path}/*.json"
    here = [f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet"]
    other = ["openai/gsm8k:main:train[:10]", "reasoning_gym:chain_sum"]
    assert sources(given) == [*here, *other, f"{tmp_path}/*.json"]
    assert files(given) == [*here, f"{tmp_path}/*.json"]
