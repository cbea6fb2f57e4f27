"""Rows that stay on disk: their order, what may be held of them, and what is said of a wrong one."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.preference import LabelledConfig, PairsConfig
from spmd_rl.config.sections.rows import RowsConfig
from spmd_rl.data import Examples
from spmd_rl.types import Conversation, Message

ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(20)]


def write(path: Path, rows: list, form: str = "lines") -> str:
    text = json.dumps(rows) if form == "array" else "".join(json.dumps(row) + "\n" for row in rows)
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if form == "gzip" else text.encode())
    return str(path)


def load(source: str, **settings) -> Examples:
    return Examples.load(RowsConfig(train=source, **{"holdout": 0.0} | settings), "demonstration")


def said(examples) -> list[str]:
    return [one.conversations[0].messages[-1].text for one in examples]


@pytest.mark.parametrize("form", ["lines", "gzip", "array", "parquet"])
def test_rows_are_read_again_from_any_file(form: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows", ROWS, form)
    rows = load(source).train
    assert said(rows) == [row["completion"] for row in ROWS] and said([rows[3], rows[0]]) == ["a3", "a0"]
    assert rows.where(3) == (f"{source}:4" if form in ("lines", "gzip") else f"{source}[3]")
    assert rows.digest == load(write(tmp_path / "other", ROWS)).train.digest
    assert rows.digest != load(write(tmp_path / "less", ROWS[1:])).train.digest


def test_an_epoch_has_each_row_once_in_an_order_of_the_seed_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "rows", ROWS)
    rows, again = load(source).train, load(source).train
    places = [rows.at(position, seed=7) for position in range(60)]
    assert [epoch for epoch, _ in places] == [0] * 20 + [1] * 20 + [2] * 20
    epochs = [[number for _, number in places[begin : begin + 20]] for begin in (0, 20, 40)]
    assert all(sorted(one) == list(range(20)) for one in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert [again.at(position, seed=7) for position in (41, 3, 59)] == [places[41], places[3], places[59]]
    assert [rows.at(position, seed=8) for position in range(60)] != places


def test_the_held_out_share_is_a_matter_of_content(tmp_path: Path) -> None:
    some = [{"text": f"text number {i}"} for i in range(400)]
    one = load(write(tmp_path / "a", some), holdout=0.2)
    other = load(write(tmp_path / "b", [*some[::-1], *some]), holdout=0.2)
    assert 50 < len(one.eval) < 110 and len(one.train) + len(one.eval) == 400
    assert set(said(other.eval)) == set(said(one.eval)) and len(other.eval) == 2 * len(one.eval)
    given = load(write(tmp_path / "c", some), holdout=0.2, eval=write(tmp_path / "d", some[:3]))
    assert (len(given.train), len(given.eval)) == (400, 3)


def test_settings_move_no_row_to_the_other_side(tmp_path: Path) -> None:
    source = write(tmp_path / "a", [{"prompt": f"say {i}", "completion": f"{i}"} for i in range(100)])
    plain, asked = load(source, holdout=0.2), load(source, holdout=0.2, format="{question} Be brief.")
    assert len(plain.eval) > 9 and (plain.eval.digest, plain.train.digest) == (asked.eval.digest, asked.train.digest)
    first = plain.eval[0].conversations[0].messages[0].content
    assert asked.eval[0].conversations[0].messages[0].content == f"{first} Be brief."


def test_memory_holds_no_row(tmp_path: Path) -> None:
    source = write(tmp_path / "large", [{"text": f"{i} " + "x" * 20_000} for i in range(1000)])
    tracemalloc.start()
    rows = load(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows.train) == 1000 and Path(source).stat().st_size > 20e6 and peak < 2e6


@pytest.mark.parametrize(
    ("row", "conversation"),
    [
        ({"question": "2+2?", "answer": "4"}, Conversation((Message("user", "2+2?"), Message("assistant", "4")), 1)),
        ({"text": "Once"}, Conversation((Message("assistant", "Once"),), is_plain=True)),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            Conversation((Message("user", "a"), Message("assistant", "b")), 1),
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            Conversation((Message("user", "a"), Message("assistant", "b"))),
        ),
    ],
)
def test_forms_of_rows(row: dict, conversation: Conversation, tmp_path: Path) -> None:
    assert load(write(tmp_path / "rows", [row])).train[0].conversations == (conversation,)


def test_a_system_message_and_a_format(tmp_path: Path) -> None:
    source = write(tmp_path / "rows", [{"q": "2+2?", "completion": "4"}])
    (one,) = load(source, keys={"prompt": "q"}, system="Be brief.", format="{question}\\nNow.").train[0].conversations
    assert [m.text for m in one.messages] == ["Be brief.", "2+2?\nNow.", "4"] and one.num_given == 2


def pair_of(row: dict, tmp_path: Path) -> list[tuple[list[str], int, bool]]:
    data = PairsConfig(train=write(tmp_path / "rows", [row]), holdout=0.0)
    (example,) = Examples.load(data, "preference").train
    return [([m.text for m in one.messages], one.num_given, one.is_plain) for one in example.conversations]


def test_forms_of_pairs(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chosen, rejected = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
    whole = {"chosen": [*first, chosen], "rejected": [*first, rejected]}
    expected = [(["a", "b", "c", "yes"], 3, False), (["a", "b", "c", "no"], 3, False)]
    assert pair_of(whole, tmp_path) == pair_of(whole | {"prompt": "c"}, tmp_path) == expected
    assert pair_of({"prompt": first, "chosen": "yes", "rejected": [rejected]}, tmp_path) == expected
    texts = {"chosen": "Human: Hi\n\nAssistant: That is it", "rejected": "Human: Hi\n\nAssistant: This is it"}
    shared = "Human: Hi\n\nAssistant:"
    assert pair_of(texts, tmp_path) == [([shared, " That is it"], 1, True), ([shared, " This is it"], 1, True)]


def test_pairs_that_are_made_of_problems_differ() -> None:
    """Of one-digit sums one in ten has the answer of the next."""
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    asked = PairsConfig(train="reasoning_gym:basic_arithmetic", size=200, args=terms, holdout=0.0)
    for row in Examples.load(asked, "preference").train:
        chosen, rejected = (one.messages[-1].text for one in row.conversations)
        assert chosen != rejected


@pytest.mark.parametrize(
    ("kind", "row", "line"),
    [
        ("preference", {"prompt": "a", "chosen": "b"}, "needs `rejected`; it has `prompt`, `chosen`: set data.keys."),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected` are the same"),
        ("ranked", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"}, "`margin` is text, not a number"),
        ("judged", {"prompt": "a", "completion": "b"}, "needs a `completion` and a `label` (true, false), or `chosen`"),
        ("judged", {"prompt": "a", "completion": "b", "label": 2}, "`label` is 2, not true or false (or 1 or 0)"),
        ("judged", {"prompt": "a", "completion": "b", "label": "yes"}, "`label` is text, not true or false"),
        ("outcome", {"prompt": "a", "chosen": "b", "rejected": "c"}, "is a pair: head=pairwise takes these"),
        (
            "process",
            {"prompt": "a", "completions": ["b"], "labels": []},
            "needs a list of `completions`, the steps, and",
        ),
        (
            "process",
            {"prompt": "a", "completions": ["b", " "], "labels": [True, True]},
            "step 2 is not text",
        ),
        ("process", {"prompt": "a", "completions": ["b", "c"], "labels": [True, 3]}, "`labels[1]` is 3, not true"),
        ("process", {"prompt": "a", "completions": ["b\n\nc"], "labels": [True]}, "step 1 contains data.separator"),
    ],
)
def test_a_wrong_pair_is_named(kind: str, row: dict, line: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows", [row])
    with pytest.raises(UserError) as caught:
        Examples.load(LabelledConfig(train=source, holdout=0.0), kind)
    assert str(caught.value).startswith(f"data.train: {source}:1: {line}")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": "a"}, "needs `messages`, a `prompt` with its `completion`, or `text`; it has `prompt`: name them"),
        ({"completion": "a"}, "needs a `prompt`; it has `completion`: set data.keys.prompt=COLUMN"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": 3, "completion": "b"}, "`prompt` is a number, not text"),
        ({"messages": [USER]}, "has no message of the role `assistant` to learn from"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "`messages[1]` needs a `role` and a `content`"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "has an empty message of the role `assistant`"),
        ({"text": "\ud800"}, "`text` holds half a character"),
        (["a"], "not an object but a list"),
    ],
)
def test_a_wrong_row_is_named(row, line: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows", [ROWS[0], row])
    with pytest.raises(UserError) as caught:
        load(source)
    assert str(caught.value).startswith(f"data.train: {source}:2: {line}")
