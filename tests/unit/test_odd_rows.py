"""Odd rows as people write them: each is read as plain transformers reads it, or refused with one line.

The reference is `apply_chat_template(messages, tools=tools)` of the row as it is written: its token ids, and as labels
its own mask of what stands between `{% generation %}` and `{% endgeneration %}`.
"""

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import DataConfig
from spmd_rl.config.sections.preference import LabelledConfig
from spmd_rl.config.sections.rows import RowsConfig
from spmd_rl.data import Examples, Prompts
from spmd_rl.model.tokenizer import Tokenizer, render_prompt
from tests.templates import tokenizer

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SAYS = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}<|im_end|>"
)
HEAD = "<|im_start|>{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}\n"
FIELDS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    + HEAD
    + "{% if m.role == 'assistant' and m.weight != 0 %}{% generation %}"
    + SAYS
    + "{% endgeneration %}{% else %}"
    + SAYS
    + "{% endif %}\n{% endfor %}"
    + ASK
)
CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATES = {
    "fields": FIELDS,
    "some roles": "{% for m in messages %}{% if m.role in ['user', 'assistant', 'system'] %}"
    + CHATML
    + "{% endif %}{% endfor %}"
    + ASK,
    "next header": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + ASK,
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    + "{% if add_generation_prompt %}assistant:{% endif %}",
}


def model(name: str, also_ends: tuple[str, ...] = ()) -> Tokenizer:
    hf = tokenizer("smollm2").hf
    hf.chat_template = TEMPLATES[name]
    return Tokenizer(hf, hf.convert_tokens_to_ids(list(also_ends)))


def user(text: str = "2+2?", **fields) -> dict:
    return {"role": "user", "content": text, **fields}


def said(text: str | None = "four", **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


TOOL = {
    "type": "function",
    "function": {"name": "w", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
}
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Oslo é"}}}

LEARNT = {
    "an answer": [user(), said()],
    "a thought of its own field": [user(), said(reasoning_content="a long\nthought")],
    "a thought alone": [user(), said("", reasoning_content="hm")],
    "thoughts of several turns": [user(), said(reasoning_content="one"), user(), said(reasoning_content="two")],
    "a name": [user(name="Ann"), said("ho", name="Bob")],
    "a name and a thought": [user(), said("ho", name="Bob", reasoning_content="hm")],
    "the first answer weighs nothing": [user(), said("bad", weight=0), user(), said("good", weight=1)],
    "the last answer weighs nothing": [user(), said("good"), user(), said("bad", weight=0)],
    "weights as floats and booleans": [user(), said("bad", weight=0.0), user(), said("good", weight=True)],
    "a call": [user(), said("", tool_calls=[CALL]), {"role": "tool", "content": "sun", "name": "w"}, said("Sun.")],
    "two calls and a text": [user(), said("I look.", tool_calls=[CALL, CALL])],
    "null fields": [user(name=None), said(name=None, tool_calls=None, reasoning_content=None)],
    "a field that no template has": [user(id=7, timestamp="now"), said(id=8)],
    "an answer like the question": [user("four"), said("four"), user("four"), said("four")],
    "a system message in the middle": [user(), said(), {"role": "system", "content": "Be brief."}, user(), said("4")],
    "a developer": [{"role": "developer", "content": "Be brief."}, user(), said()],
}


@pytest.mark.parametrize("with_tools", [False, True, "as text"])
@pytest.mark.parametrize("messages", LEARNT.values(), ids=LEARNT)
def test_conversations_and_what_is_learnt_of_them(messages, with_tools, tmp_path: Path) -> None:
    tools = [TOOL] if with_tools else None
    row = {"messages": messages} | ({"tools": json.dumps(tools) if with_tools == "as text" else tools} if tools else {})
    t, (example,) = model("fields"), rows(tmp_path, [row])
    plain = t.hf.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    pieces = t.pieces(example.conversations[0])
    ids = [token for given, learnt in pieces for token in (*given, *learnt)]
    labels = [label for given, learnt in pieces for label in (*[0] * len(given), *[1] * len(learnt))]
    assert ids == plain["input_ids"][: len(ids)]
    assert labels == plain["assistant_masks"][: len(ids)] and not any(plain["assistant_masks"][len(ids) :])


PROMPTS = {
    "a text": {"question": "2+2?", "answer": "4"},
    "messages": {"messages": [user("2+2?", name="Ann")], "answer": "4"},
    "tools": {"prompt": [user()], "tools": [TOOL], "answer": "4"},
    "tools as text": {"question": "2+2?", "tools": json.dumps([TOOL]), "answer": "4"},
    "no tools": {"question": "2+2?", "tools": [], "answer": "4"},
    "a conversation": {"prompt": [user(), said(reasoning_content="hm"), user("Sure?")], "answer": "4"},
    "a developer": {"prompt": [{"role": "developer", "content": "Be brief."}, user()], "answer": "4"},
}


@pytest.mark.parametrize("row", PROMPTS.values(), ids=PROMPTS)
def test_prompts_are_what_plain_transformers_makes_of_them(row, tmp_path: Path) -> None:
    t, prompt = model("fields"), one_prompt(tmp_path, row)
    messages = row.get("messages") or row.get("prompt") or [user(row["question"])]
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools") or None
    how = {"tools": tools, "add_generation_prompt": True, "return_dict": True}
    assert t.render(prompt.messages).tolist() == t.hf.apply_chat_template(messages, **how)["input_ids"]
    assert prompt.ground_truth == "4" and prompt.where == f"{tmp_path / 'rows.jsonl'}:1"


NUMBERS = {
    "0.00001": "0.00001",
    "1e-05": "0.00001",
    "1E16": "10000000000000000",
    "1.2e3": "1200",
    "4.0": "4",
    "-0.0": "0",
    "-2.50": "-2.5",
    "12345678901234567890123": "12345678901234567890123",
    '"1e-05"': "1e-05",
    '"4.0"': "4.0",
}


@pytest.mark.parametrize(("written", "truth"), NUMBERS.items())
def test_numbers_have_one_decimal_spelling(written: str, truth: str, tmp_path: Path) -> None:
    assert one_prompt(tmp_path, f'{{"question": "q", "answer": {written}}}').ground_truth == truth
    nested = f'{{"question": "q", "reward_model": {{"ground_truth": {written}}}}}'
    assert one_prompt(tmp_path, nested).ground_truth == truth


@pytest.mark.parametrize(
    ("column", "truth"),
    [
        (pa.array([1e-5]), "0.00001"),
        (pa.array([4.0]), "4"),
        (pa.array([0.1], pa.float32()), "0.1"),
        (pa.array([Decimal("0.0000001")]), "0.0000001"),
        (pa.array([Decimal("4.00")]), "4"),
        (pa.array(["vier ✓".encode()]), "vier ✓"),
        (pa.array([7], pa.int8()), "7"),
        (pa.array(["seven"]).dictionary_encode(), "seven"),
    ],
)
def test_columns_of_tables(column: pa.Array, truth: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": pa.array([b"2+2?"]), "answer": column}), tmp_path / "rows.parquet")
    (prompt,) = Prompts.load(DataConfig(train=str(tmp_path / "rows.parquet"), holdout=0.0)).train
    assert (prompt.messages[0].content, prompt.ground_truth) == ("2+2?", truth)


IO, CALLED = [{"input": "1 2\n3 4", "output": "3\n7"}], [{"input": "1\n[2]", "output": "[3]"}]
ENDS = {"inputs": ["1 2\n3 4"], "outputs": ["3\n7"]}
TESTS = {
    "lines": ({"test_cases": [{"input": ["1 2", "3 4"], "output": ["3", "7"]}]}, IO, None),
    "lines of numbers": ({"test_cases": [{"input": [1, 2.0], "output": 3}]}, [{"input": "1\n2", "output": "3"}], None),
    "verl's": ({"reward_model": {"style": "rule", "ground_truth": json.dumps(ENDS)}}, IO, None),
    "verl's as an object": ({"reward_model": {"style": "rule", "ground_truth": ENDS}}, IO, None),
    "PRIME's": (
        {"ground_truth": json.dumps({"inputs": ["1\n[2]"], "outputs": ["[3]"], "fn_name": "f"})},
        CALLED,
        "f",
    ),
    "APPS's function": ({"input_output": {"inputs": [[1, [2]]], "outputs": [[[3]]], "fn_name": "f"}}, CALLED, "f"),
    "TRL's": (
        {
            "verification_info": {
                "language": "python",
                "test_cases": [{"type": "stdin_stdout", "fn_name": None, **IO[0]}],
            }
        },
        IO,
        None,
    ),
    "SYNTHETIC-1's, a literal": (
        {
            "verification_info": str(
                {
                    "test_cases": [
                        {"fn_name": "f", "input": [1, [2]], "output": [3]},
                        {"fn_name": "f", "input": [4], "output": 5},
                    ]
                }
            )
        },
        [*CALLED, {"input": "4", "output": "5"}],
        "f",
    ),
    "rllm's": ({"tests": json.dumps([{"input": ["1 2", "3 4"], "output": ["3", "7"], "testtype": "stdin"}])}, IO, None),
    "ROLL's": ({"test_cases": json.dumps([{"stdin": "1 2\n3 4", "expected_stdout": "3\n7"}])}, IO, None),
}


@pytest.mark.parametrize(("row", "cases", "function"), TESTS.values(), ids=TESTS)
def test_rows_of_programs(row, cases, function, tmp_path: Path) -> None:
    prompt = one_prompt(tmp_path, {"prompt": [user("Add.")], **row})
    assert (prompt.domain, prompt.ground_truth, prompt.extra["test_cases"]) == ("code", "", cases)
    assert prompt.extra.get("test_case_function") == function


@pytest.mark.parametrize("kwargs", ['["{}", "{\\"n\\": 2}"]', ["{}", '{"n": 2}'], [{}, {"n": 2}], '[{}, {"n": 2}]'])
def test_instructions_of_ifeval(kwargs, tmp_path: Path) -> None:
    row = {"prompt": "Write.", "instruction_id_list": ["a:b", "c:d"], "kwargs": kwargs}
    prompt = one_prompt(tmp_path, row)
    assert prompt.domain == "ifeval" and prompt.extra["kwargs"] == [{}, {"n": 2}]


REFUSED = {
    "NaN": ('{"question": "q", "answer": NaN}', "`answer` is NaN, as a missing number is written: leave the row out"),
    "infinity": ('{"question": "q", "answer": -Infinity}', "`answer` is infinite, not text or a number"),
    "a NaN of verl": ('{"question": "q", "reward_model": {"ground_truth": NaN}}', "`ground_truth` is NaN"),
    "no tests": ({"prompt": "p", "test_cases": [], "solution": "print(1)"}, "`test_cases` is empty, and a `solution`"),
    "no tests of verl": ({"prompt": "p", "ground_truth": {"inputs": [], "outputs": []}}, "`ground_truth` has 0 inputs"),
    "an input too few": (
        {"prompt": "p", "input_output": {"inputs": ["1"], "outputs": ["1", "2"]}},
        "`input_output` has 1 inputs and 2",
    ),
    "a line that is none": (
        {"prompt": "p", "tests": [{"input": [[1]], "output": "1"}]},
        "`tests[0]` has a list where a",
    ),
    "instructions without arguments": (
        {"prompt": "p", "instruction_id_list": ["a:b"], "kwargs": []},
        "`kwargs` needs an object for each",
    ),
    "tools that are names": ({"question": "q", "answer": "4", "tools": ["w"]}, "`tools` is not a list of objects"),
    "a weight of a half": (
        {"messages": [user(weight=0.5)], "answer": "4"},
        "`messages[0]` has a `weight` of 0.5: known are 1, and 0",
    ),
    "content in parts of another kind": (
        {"messages": [user([{"type": "video", "video": "a.mp4"}])], "answer": "4"},
        "`messages[0]` needs parts of the types text, image and image_url; one is of 'video'",
    ),
}


@pytest.mark.parametrize(("row", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(row, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        one_prompt(tmp_path, row)
    assert str(caught.value).startswith(f"data.train: {tmp_path / 'rows.jsonl'}:1: {line}")


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (pa.array([float("nan")]), "`answer` is NaN"),
        (pa.array(["Zürich".encode("latin-1")]), "`answer` holds bytes that are not UTF-8: save it as text"),
    ],
)
def test_what_is_refused_of_tables(column, line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["q"], "answer": column}), path)
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(train=str(path), holdout=0.0))
    assert str(caught.value).startswith(f"data.train: {path}[0]: {line}")


@pytest.mark.parametrize("role", ["human", "User", "developer", "function", "gpt", "tool"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_role_that_the_template_leaves_out_is_named(role: str, place: int, tmp_path: Path) -> None:
    t, odd = model("some roles"), {"role": role, "content": "2+2?"}
    line = f"message {place + 1} has the role `{role}`, which the model's chat template .* leaves out"
    prompt = one_prompt(tmp_path, {"prompt": [user(), odd][1 - place :] + [user()] * (1 - place), "answer": "4"})
    with pytest.raises(UserError, match=f"^{tmp_path / 'rows.jsonl'}:1: {line}"):
        render_prompt(t, prompt)
    (example,) = rows(tmp_path, [{"messages": [*[user()] * place, odd, said()]}])
    with pytest.raises(UserError, match=line):
        t.pieces(example.conversations[0])
    assert t.render(one_prompt(tmp_path, {"question": "2+2?", "answer": "4"}).messages), "others are read as before"


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [user(), said()], "tools": [TOOL]}, "tools"),
        ({"messages": [user(), said("", tool_calls=[CALL])]}, "tool_calls"),
        ({"messages": [user(), said(reasoning_content="hm")]}, "reasoning_content"),
    ],
)
def test_what_the_template_has_no_place_for_is_named(row, name: str, tmp_path: Path) -> None:
    (example,) = rows(tmp_path, [row])
    for t in (model("some roles"), tokenizer("gemma2")):
        with pytest.raises(UserError, match=f"has `{name}`, for which the model's chat template .* has no place"):
            t.pieces(example.conversations[0])


def test_an_answer_ends_with_the_header_that_a_question_would_have(tmp_path: Path) -> None:
    (example,) = rows(tmp_path, [{"messages": [user(), said(), user(), said("4")]}])
    t = model("next header", also_ends=("<|im_start|>",))
    pieces = t.pieces(example.conversations[0])
    assert [t.visible(learnt) for _, learnt in pieces] == ["four<|im_start|>", "4<|im_start|>"]


@pytest.mark.parametrize(("name", "warns"), [("no end", True), ("next header", True), ("fields", False)])
def test_an_end_that_is_not_learnt_is_said_once(name: str, warns: bool, tmp_path: Path, capsys) -> None:
    (example,) = rows(tmp_path, [{"messages": [user(), said()]}])
    t = model(name)
    for _ in range(2):
        t.pieces(example.conversations[0])
    assert capsys.readouterr().err.count("the end of an answer is not trained on") == warns


@pytest.mark.parametrize(("label", "first"), [(1, 0), (0, 1), (1.0, 0), (True, 0), (False, 1)])
def test_labels(label, first: int, tmp_path: Path) -> None:
    found = rows(tmp_path, [{"prompt": p, "completion": "b", "label": label} for p in "ac"], "judged", LabelledConfig)
    assert [example.first for example in found] == [first, first]


def test_an_answer_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    alike = [{"prompt": "a", "completion": text, "label": True} for text in "bc"]
    with pytest.raises(UserError, match="all rows have the same prompt; preference.loss=kto"):
        rows(tmp_path, alike, "judged", LabelledConfig)


@pytest.mark.parametrize("special", [True, False])
def test_tags_are_read_whatever_kind_of_token_they_are(special: bool) -> None:
    hf, tags = tokenizer("smollm2").hf, ["<answer>", "</answer>"]
    if special:
        hf.add_special_tokens({"additional_special_tokens": tags})
    else:
        hf.add_tokens(tags)
    t = Tokenizer(hf)
    ids = t.encode("<|im_start|><answer>4</answer><|im_end|>")
    assert len(ids) == 5 and t.decode(ids) == "<answer>4</answer>"


def one_prompt(tmp_path: Path, row):
    """The prompt of a file of one row, an object or the text of a line."""
    path = tmp_path / "rows.jsonl"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    (prompt,) = Prompts.load(DataConfig(train=str(path), holdout=0.0)).train
    return prompt


def rows(tmp_path: Path, found: list, kind: str = "demonstration", config=RowsConfig) -> list:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return list(Examples.load(config(train=str(path), holdout=0.0), kind).train)
