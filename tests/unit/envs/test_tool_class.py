"""Tool classes of a user: schemas, calls, replies, rewards and the end of an episode."""

import json

import pytest

from envs.adapters.tool_class import ToolClassEnv
from envs.tool_calls import BadCall, ToolCall, read_calls

HERE = "tests.unit.envs.tool_classes"


def call(name: str, **arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.fixture
def guess(tmp_path) -> ToolClassEnv:
    rows = tmp_path / "rows.jsonl"
    system, user = {"role": "system", "content": "Be quick."}, {"role": "user", "content": "Play!"}
    rows.write_text(json.dumps({"prompt": [system, user], "secret": 3}) + '\n\n{"prompt": "Go", "secret": 4}\n')
    return ToolClassEnv(f"{HERE}:Guess", str(rows))


def test_reset_gives_the_row_and_the_tools(guess: ToolClassEnv) -> None:
    observation, info = guess.reset(2)
    assert observation == "Play!\n\nI think of a number from 1 to 10." and info["instruction"] == "Be quick."
    assert guess.reset(3)[0].startswith("Go\n\n")
    digits, shown = info["tools"]
    assert digits["function"]["parameters"]["properties"]["numbers"] == {"type": "array", "items": {"type": "integer"}}
    assert shown == {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number. Some more words.",
            "parameters": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "description": "Your guess, from 1 to 10."},
                    "tone": {"enum": ["kind", "rude"], "description": "How to say it.", "default": "kind"},
                },
                "required": ["number"],
            },
        },
    }


def test_an_episode_to_its_end(guess: ToolClassEnv) -> None:
    guess.reset(0)
    text, reward, terminated, truncated, info = guess.step(call("guess", number=2))
    assert (text, reward, terminated, truncated) == ("no, kind", 0.0, False, False)
    assert info["metrics"] == {
        "success": 0.0,
        "action_is_valid": 1.0,
        "action_is_effective": 1.0,
        "tool_calls": 1.0,
        "tool_failures": 0.0,
    }
    text, reward, terminated, _, info = guess.step(f"I know! <tool_call>\n{call('guess', number='3')}\n</tool_call>")
    assert (text, reward, terminated, info["metrics"]["success"]) == ("yes, kind", 1.0, True, 1.0)
    assert guess.reset(0)[1]["tools"] and guess.step("I give up.")[:3] == ("", 0.0, True)


@pytest.mark.parametrize(
    ("action", "valid", "reply"),
    [
        (call("guess", number=11), True, "error: IndexError('more than ten')"),
        (call("guess", number="three"), False, "error: guess: the argument number: Expected `int`, got `str`"),
        (call("guess", number=1, tone="loud"), False, "error: guess: the argument tone: Invalid enum value 'loud'"),
        (call("guess"), False, "error: guess: missing a required argument: 'number'"),
        (call("guess", n=1), False, "error: guess: missing a required argument: 'number'"),
        (call("_hidden"), False, "error: there is no tool _hidden; there are: digits, guess"),
        (call("reset"), False, "error: there is no tool reset; there are: digits, guess"),
        ("{'name': 'guess'}", False, "error: the call is not valid JSON"),
        ("<tool_call>{}", False, "error: a <tool_call> without its end, </tool_call>"),
        ("<tool_call>{}</tool_call>", False, 'error: a call looks like {"name": "...", "arguments": {...}}'),
        ("  ", False, "error: the turn has neither a tool call nor an answer"),
    ],
)
def test_a_failure_is_the_reply(guess: ToolClassEnv, action: str, valid: bool, reply: str) -> None:
    guess.reset(0)
    text, reward, terminated, _, info = guess.step(action)
    assert text.startswith(reply) and (reward, terminated) == (0.0, False)
    assert info["metrics"]["action_is_valid"] == valid and info["metrics"]["action_is_effective"] == 0.0


def test_several_calls_and_a_result_that_is_no_text(guess: ToolClassEnv) -> None:
    guess.reset(0)
    both = f"<tool_call>{call('digits', numbers=[1, 22])}</tool_call><tool_call>{call('guess', number=1)}</tool_call>"
    text, _, _, _, info = guess.step(both)
    assert text == '{"count":3}\nno, kind' and info["metrics"]["tool_calls"] == 2.0


def test_rewards_that_grow_are_paid_as_they_grow() -> None:
    env = ToolClassEnv(f"{HERE}:Counter")
    for seed in (7, 8):
        assert env.reset(seed)[0] == ""
        assert [env.step(call("add"))[1] for _ in range(2)] == [0.25, 0.25]
        text, reward, ended, _, info = env.step(call("add"))
        assert (text, reward, ended, info["metrics"]["success"]) == (str(seed), 0.25, False, 0.0)
        assert env.step("done")[1:3] == (0.0, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoHint", "the tool tool has no type hint for its parameter x"),
        ("NoDocstring", "the tool tool has no docstring"),
        ("NoTools", "it has no public methods"),
        ("Nothing", "has no class Nothing"),
    ],
)
def test_a_class_that_cannot_be_used_says_why(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolClassEnv(f"{HERE}:{name}")


def test_forms_of_a_call() -> None:
    wanted = [ToolCall("f", {"x": 1})]
    for action in (
        '{"name": "f", "arguments": {"x": 1}}',
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}',
        'So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> so be it',
    ):
        assert read_calls(action) == wanted
    assert read_calls('{"name": "f"}') == [ToolCall("f", {})]
    assert read_calls("The set is {1, 2}.") == read_calls("") == []
    for broken in ('{"name": 1}', '{"name": "f", "arguments": [1]}', "{" * 5000, "[" * 3 + "{", "<tool_call>" * 2):
        if broken.startswith("[["):
            assert read_calls(broken) == []
            continue
        with pytest.raises(BadCall):
            read_calls(broken)
    with pytest.raises(BadCall, match="9 calls in one turn, and 8 is the most"):
        read_calls('<tool_call>{"name": "f"}</tool_call>' * 9)
