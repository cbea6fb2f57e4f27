"""The dialogue: what the customer tells, a good agent's episode, and a customer who is a language model."""

import asyncio
import json
import re

import pytest

from envs.dialogue import SAID, WISHES, DialogueEnv, LlmDialogueEnv


def call(tool: str, **arguments) -> str:
    return json.dumps({"name": tool, "arguments": arguments})


def heard(text: str) -> dict[str, str]:
    """Return the wishes that the customer names in a text."""
    patterns = {name: re.escape(said).replace(r"\{\}", r"([\w:]+)") for name, said in SAID.items()}
    return {name: found[1] for name, pattern in patterns.items() if (found := re.search(pattern, text))}


def serve(env: DialogueEnv, seed: int) -> tuple[float, dict[str, float], int]:
    """Play a good agent, who knows nothing but what is said: (reward, metrics, messages)."""
    text, _ = env.reset(seed)
    known, messages = heard(text), 0

    def ask(question: str) -> str:
        nonlocal messages
        messages += 1
        return env.step(question)[0]

    questions = {"cuisine": "Which food?", "area": "Which area?", "price": "What budget?", "day": "Which day?"}
    for name, question in (questions | {"time": "At what time?", "people": "How many guests?"}).items():
        if name not in known:
            known |= heard(ask(question))
    assert set(known) == set(WISHES)
    wanted = {name: known[name] for name in ("cuisine", "area", "price")}
    found = env.step(call("search", **wanted))[0]
    if found.startswith("There is no"):
        first, second = re.search(r"If (\w+) cannot be had, then (\w+) is fine", ask("Sorry, there is none.")).groups()
        wanted = {name: second if value == first else value for name, value in wanted.items()}
        found = env.step(call("search", **wanted))[0]
    booking = {name: known[name] for name in ("day", "time", "people")}
    _, reward, terminated, _, info = env.step(call("book", name=found.split(":")[0], **booking))
    assert terminated
    return reward, info["metrics"], messages


def test_a_good_agent_meets_every_wish() -> None:
    env = DialogueEnv()
    played = [serve(env, seed) for seed in range(60)]
    assert {(reward, metrics["success"], metrics["booked"]) for reward, metrics, _ in played} == {(1.0, 1.0, 1.0)}
    assert 10 < sum(messages == 5 for _, _, messages in played) < 50  # the others had to ask for the second choice


def test_the_oracle_s_booking_is_right_and_any_other_is_not() -> None:
    env = DialogueEnv(partial=True)
    for seed in range(40):
        env.reset(seed)
        right = env.right_booking()
        wrong = right | {"time": "12:00"}
        env.reset(seed)
        text, reward, terminated, _, info = env.step(call("book", **wrong))
        assert terminated and reward == pytest.approx(5 / 6) and info["metrics"]["success"] == 0.0
        assert info["metrics"]["wishes_met"] == reward and "is booked" in text
        env.reset(seed)
        assert env.step(call("book", **right))[1:3] == (1.0, True)


def test_the_customer_tells_what_is_asked_and_two_things_at_most() -> None:
    env = DialogueEnv()
    text, info = env.reset(5)
    assert len(heard(text)) == 2 and "search" in info["instruction"]
    assert [tool["function"]["name"] for tool in info["tools"]] == ["search", "book"]
    assert list(heard(env.step("What cuisine, area, price, day, time and how many people?")[0])) == ["cuisine", "area"]
    assert list(heard(env.step("When?")[0])) == ["day", "time"]
    assert env.step("Nice weather.")[0] == "I just want to book a table."


def test_patience_ends() -> None:
    env = DialogueEnv(patience=3)
    env.reset(0)
    steps = [env.step("Hello?") for _ in range(4)]
    assert [step[2] for step in steps] == [False, False, False, True]
    assert "left" in steps[-1][0] and steps[-1][1] == 0.0 and steps[-1][4]["metrics"]["booked"] == 0.0


@pytest.mark.parametrize(
    ("action", "reply", "valid"),
    [
        ("", "error: the turn has neither", False),
        (call("book", name="Nowhere", day="Monday", time="19:00", people=2), "error: there is no restaurant", True),
        (call("book", name="Anchor"), "error: book: missing a required argument", False),
        (call("search", cuisine="Martian"), "There is no such restaurant.", True),
    ],
)
def test_what_goes_wrong_is_the_reply(action: str, reply: str, valid: bool) -> None:
    env = DialogueEnv()
    env.reset(0)
    text, reward, terminated, _, info = env.step(action)
    assert text.startswith(reply) and (reward, terminated) == (0.0, False)
    assert info["metrics"]["action_is_valid"] == valid


def test_seeds_and_settings() -> None:
    one, two = DialogueEnv(), DialogueEnv()
    assert [one.reset(seed) for seed in range(20)] == [two.reset(seed) for seed in range(20)]
    with pytest.raises(ValueError, match="patience=0"):
        DialogueEnv(patience=0)


class FakeHttp:
    """Answers as a chat completions server does."""

    def __init__(self) -> None:
        self.asked = []

    async def post(self, url: str, body, headers={}):
        self.asked.append((url, json.loads(json.dumps(body)), dict(headers)))
        return {"choices": [{"message": {"content": " On Friday. "}}]}


def test_a_customer_who_is_a_language_model(monkeypatch) -> None:
    monkeypatch.setenv("KEY", "k")
    http = FakeHttp()
    env = LlmDialogueEnv(http, "http://127.0.0.1:1/v1/", "tiny", key_env="KEY")
    text, _ = env.reset(3)

    async def episode():
        said = await env.step("Which day?")
        assert said[:3] == ("On Friday.", 0.0, False) and said[4]["metrics"]["messages"] == 1.0
        await env.step(call("search"))
        await env.step("And when?")
        return await env.step(call("book", **env.right_booking()))

    assert asyncio.run(episode())[1:3] == (1.0, True)
    (url, first, headers), (_, second, _) = http.asked
    assert url == "http://127.0.0.1:1/v1/chat/completions" and headers == {"Authorization": "Bearer k"}
    assert [m["role"] for m in second["messages"]] == ["system", "assistant", "user", "assistant", "user"]
    assert first["messages"][1]["content"] == text and first["messages"][2]["content"] == "Which day?"
    assert "Never change your wishes" in first["messages"][0]["content"] and first["model"] == "tiny"
