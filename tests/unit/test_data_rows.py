"""JSONL rows: every shape that is accepted, and one clear line for every one that is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.data.rows import read_rows
from spmd_rl.types import Message

GOOD = b'{"question": "2+2?", "answer": "4"}'


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file of rows, each an object or the bytes of a line."""
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
    return path


def one(tmp_path: Path, row: Any) -> Any:
    (out,) = read_rows(write(tmp_path / "a.jsonl", row), "data.train")
    return out


def test_question_and_answer(tmp_path: Path) -> None:
    row = one(tmp_path, {"question": "2+2?", "answer": 4, "level": 1})
    assert (row.problem, row.ground_truth, row.domain, row.id, row.extra) == ("2+2?", "4", "math", None, {"level": 1})


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("4*2=8\nso 8\n#### 8", "8"),
        ("#### 1,234", "1234"),
        ("a #### b\n#### -5 ", "-5"),
        ("x\n#### $1,000.50", "$1000.50"),
        ("#### 1,2", "1,2"),
        ("a #### first\nno mark here", "a #### first\nno mark here"),
        ("3/4", "3/4"),
    ],
)
def test_what_follows_the_last_hashes_is_the_truth(tmp_path: Path, answer: str, truth: str) -> None:
    row = one(tmp_path, {"question": "q", "answer": answer})
    assert row.ground_truth == truth
    assert row.extra == ({"answer": answer} if truth != answer else {})


def test_prompt_with_ground_truth_and_id(tmp_path: Path) -> None:
    row = one(tmp_path, {"prompt": "p", "ground_truth": "#### 1", "domain": "code", "id": 7, "answer": "kept"})
    assert (row.problem, row.ground_truth, row.domain, row.id) == ("p", "#### 1", "code", "7")
    assert row.extra == {"answer": "kept"}


@pytest.mark.parametrize(
    ("row", "domain"),
    [
        ({"question": "q", "answer": "1"}, "math"),
        ({"question": "q", "answer": "1", "tag": "RLVR"}, "RLVR"),
        ({"question": "q", "answer": "1", "tag": None}, "math"),
        ({"question": "q", "answer": "1", "tag": "RLVR", "domain": "general"}, "general"),
        ({"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "ifeval"),
        ({"question": "q", "solution": "s", "test": "def test(): pass"}, "code"),
        ({"prompt": "p", "ground_truth": "", "test_cases": "[{}]", "tag": "KodCode"}, "KodCode"),
        ({"prompt": "p", "ground_truth": "1", "test_cases": "", "case_type": ""}, "math"),
    ],
)
def test_domain_by_name_by_tag_or_by_what_a_row_is_judged_by(tmp_path: Path, row: Any, domain: str) -> None:
    found = one(tmp_path, row)
    assert found.domain == domain
    kept = {name: value for name, value in row.items() if name in ("tag", "test", "test_cases", "instruction_id_list")}
    assert kept.items() <= found.extra.items()


def test_ids_count_within_a_tag(tmp_path: Path) -> None:
    assert one(tmp_path, {"question": "q", "answer": "1", "tag": "RLVR", "id": "7"}).id == "RLVR/7"


def test_humaneval_keeps_the_head_of_the_function(tmp_path: Path) -> None:
    head = "def add(a, b):\n"
    row = {"task_id": "HumanEval/0", "prompt": head, "entry_point": "add", "canonical_solution": "    return a + b\n"}
    found = one(tmp_path, row | {"test": "def check(f): assert f(1, 2) == 3"})
    assert (found.problem, found.ground_truth, found.domain) == (head, "", "code")
    assert found.extra["prompt"] == head and found.extra["canonical_solution"].strip() == "return a + b"


@pytest.mark.parametrize("as_text", [False, True])
def test_messages_as_a_list_or_as_json_text(tmp_path: Path, as_text: bool) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = one(tmp_path, {"messages": json.dumps(messages) if as_text else messages, "prompt": "u", "ground_truth": ""})
    assert row.problem == (Message("system", "s"), Message("user", "u"))
    assert row.ground_truth == "" and row.extra == {"prompt": "u"}


def test_line_ends_bom_and_blank_lines(tmp_path: Path) -> None:
    separator = json.dumps({"question": "a\u2028b\x0bc", "answer": "1"}, ensure_ascii=False).encode()
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r", b"", b"  ", separator)
    rows = list(read_rows(path, "data.train"))
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:4"]
    assert rows[1].problem == "a\u2028b\x0bc"


USER = [{"role": "user", "content": "u"}]
DIALOGUE = [*USER, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "truth", "domain"),
    [
        ({"prompt": USER, "solution": "4"}, "4", "math"),
        ({"prompt": USER, "solution": "So \\boxed{3}, no: \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}", "math"),
        ({"prompt": USER, "solution": "\\boxed{1,234}"}, "1234", "math"),
        ({"prompt": USER, "solution": "\\boxed{never closed"}, "\\boxed{never closed", "math"),
        ({"prompt": USER, "solution": "no", "answer": "4"}, "4", "math"),
        ({"problem": "p", "solution": "s", "answer": 4, "messages": DIALOGUE}, "4", "math"),
        ({"prompt": USER, "reward_model": {"style": "rule", "ground_truth": "7"}, "ability": "MATH"}, "7", "math"),
        ({"prompt": USER, "reward_model": {"ground_truth": 7}, "ability": "code", "answer": "no"}, "7", "code"),
        ({"prompt": USER, "reward_model": {"ground_truth": "7"}, "ground_truth": "8", "ability": None}, "8", "math"),
    ],
)
def test_rows_as_trl_and_verl_have_them(tmp_path: Path, row: Any, truth: str, domain: str) -> None:
    found = one(tmp_path, row | {"data_source": "openai/gsm8k", "extra_info": {"index": 3}})
    assert found.problem == ("p" if "problem" in row else (Message("user", "u"),))
    assert (found.ground_truth, found.domain) == (truth, domain)
    assert found.extra["data_source"] == "openai/gsm8k" and found.extra["extra_info"] == {"index": 3}


@pytest.mark.parametrize(
    ("columns", "row", "problem", "truth"),
    [
        ({"question": "text", "answer": "result"}, {"text": "q", "result": "#### 5"}, "q", "5"),
        ({"question": "a.b", "ground_truth": "c.d"}, {"a": {"b": "q"}, "c": {"d": 5}}, "q", "5"),
        ({"question": "a.b", "answer": "n"}, {"a.b": "q", "n": 5}, "q", "5"),
        ({"question": "text"}, {"text": "q", "messages": DIALOGUE, "answer": "5"}, "q", "5"),
        ({"answer": "label"}, {"question": "q", "ground_truth": "no", "label": "5"}, "q", "5"),
        ({"answer": "label"}, {"question": "q", "answer": "5"}, "q", "5"),
        ({"ground_truth": None}, {"question": "q", "answer": "kept"}, "q", ""),
        ({"domain": None}, {"question": "q", "answer": "5", "domain": ["Algebra"]}, "q", "5"),
    ],
)
def test_columns_by_the_names_that_the_user_gives(tmp_path: Path, columns, row, problem, truth) -> None:
    (found,) = read_rows(write(tmp_path / "a.jsonl", row), "data.train", columns)
    assert (found.problem, found.ground_truth, found.domain) == (problem, truth, "math")


@pytest.mark.parametrize(
    ("columns", "row", "cure"),
    [
        ({}, {"text": "q", "answer": "1"}, "it has `text`, `answer`: name the question with data.keys.quest"),
        (
            {},
            {"question": "q", "label": "1"},
            "it has `question`, `label`: set data.keys.answer=COLUMN, or data.keys.gr",
        ),
        (
            {"question": "txt"},
            {"text": "q", "answer": "1"},
            "has no `txt` (data.keys.question); it has `text`, `answer`",
        ),
        (
            {"answer": "a.c"},
            {"question": "q", "a": {"b": 1}},
            "has no `a.c` (data.keys.answer); it has `question`, `a`",
        ),
        (
            {"answer": "a", "question": "q"},
            {"text": "q", "label": "1"},
            "has no `a` (data.keys.answer) and no `q` (data.keys.question); it has `text`, `label`",
        ),
        ({}, {"text": "q", "label": "1"}, "=COLUMN; and it needs `ground_truth` or `answer`; it has `text`, `label`"),
    ],
)
def test_an_unknown_shape_names_its_columns_and_the_setting(tmp_path: Path, columns, row, cure: str) -> None:
    with pytest.raises(UserError) as caught:
        list(read_rows(write(tmp_path / "a.jsonl", row), "data.train", columns))
    assert cure in str(caught.value) and "\n" not in str(caught.value)


BROKEN = [
    (b"{", "not JSON"),
    (b'{"question": "a"', "not JSON"),
    (b'{"question": "\xff", "answer": "1"}', "not UTF-8"),
    (b"[1]", "not an object but a list"),
    (b"3", "not an object but a number"),
    ({"answer": "1"}, "needs `question`, `prompt` or `messages`"),
    ({"question": "a"}, "needs `ground_truth` or `answer`"),
    ({"question": "a", "test": "", "test_cases": []}, "needs `ground_truth` or `answer`"),
    ({"question": "a", "answer": "1", "tag": 3}, "`tag` is a number, not text"),
    ({"question": "a", "answer": "1", "tag": " "}, "`tag` is empty"),
    ({"question": "a", "answer": None}, "`answer` is null"),
    ({"question": "a", "answer": True}, "`answer` is a boolean"),
    ({"question": "a", "answer": ["1"]}, "`answer` is a list"),
    ({"question": " \n", "answer": "1"}, "`question` is empty"),
    ({"question": 5, "answer": "1"}, "`question` is a number"),
    ({"prompt": [], "ground_truth": "1"}, "`prompt` is not a list of messages"),
    ({"prompt": "\ud800", "ground_truth": "1"}, "`prompt` holds half a character"),
    ({"messages": "{", "ground_truth": "1"}, "`messages` is not JSON"),
    ({"messages": [], "ground_truth": "1"}, "`messages` is not a list"),
    ({"messages": {"role": "user"}, "ground_truth": "1"}, "`messages` is not a list"),
    ({"messages": [{"role": "user"}], "ground_truth": "1"}, "`messages[0]` needs"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}], "ground_truth": "1"}, "`messages[0]` needs"),
    ({"messages": ["hi"], "ground_truth": "1"}, "`messages[0]` needs"),
    ({"messages": [{"role": "user", "content": " "}], "ground_truth": "1"}, "are empty"),
    ({"messages": [{"role": "assistant", "content": "4"}], "ground_truth": "1"}, "a message of the assistant"),
    ({"question": "a", "answer": "1", "domain": ""}, "`domain` is empty"),
    ({"question": "a", "answer": "1", "domain": 3}, "`domain` is a number"),
    ({"question": "a", "answer": "1", "id": 1.5}, "`id` is a number"),
    ({"question": "a", "answer": "1", "id": ""}, "`id` is"),
    ({"question": "a", "answer": "1", "id": True}, "`id` is a boolean"),
    ({"question": "a", "answer": "1", "priority": "high"}, "`priority` is text, not a number"),
    ({"question": "a", "answer": "1", "priority": True}, "`priority` is a boolean"),
    ({"question": "a", "answer": "1", "priority": None}, "`priority` is null"),
    (b'{"question": "a", "answer": "1", "priority": 1e400}', "`priority` is inf, not within 1e+09 of 0"),
]


@pytest.mark.parametrize(("row", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, b"", row, GOOD)
    with pytest.raises(UserError) as caught:
        list(read_rows(path, "data.train"))
    assert str(caught.value).startswith(f"data.train: {path}:3: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"data.eval: .*a.jsonl has no rows"):
        list(read_rows(tmp_path / "a.jsonl", "data.eval"))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="data.train: cannot read"):
        list(read_rows(tmp_path / name, "data.train"))
