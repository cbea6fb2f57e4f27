"""Templates name the fields that they know; what is no field is left alone."""

import pytest

from rewards.judge import JudgeReward
from spmd_rl.base.errors import UserError
from spmd_rl.config.load import load
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.types import unknown_fields

FIELDS = "{instruction}, {suffix}, {reminder}, {history}, {turn}, {turns_left}, {max_tokens}, {observation}"


@pytest.mark.parametrize(
    "text",
    [
        "{known}",
        r"{known}\n{known} \boxed{answer} \frac{a}{b} \text{{known}} x_{i}^{n} 2^{n+1} \{a, b\} \sqrt[3]{x}",
        '{known} {} {"a": 1} {a: 1} {1, 2} { } {{"name": NAME}}',
    ],
)
def test_other_braces_are_text(text: str) -> None:
    assert unknown_fields(text, ["known"]) == []


@pytest.mark.parametrize(
    "field", ["{nope}", "{Known}", "{ known }", "{known!r}", "{known:>5}", "{known.x}", "{known[0]}", "{_}", "{k1}"]
)
@pytest.mark.parametrize("around", ["{known} %s", "{known}%s", r"{known}\n%s", "a%s{known}", "%s%s"])
def test_what_nobody_fills_in_is_named_once(field: str, around: str) -> None:
    assert unknown_fields(around.replace("%s", field), ["known"]) == [field]


@pytest.mark.parametrize("key", ["template", "next_template"])
def test_an_agent_s_templates(key: str) -> None:
    with pytest.raises(UserError) as error:
        load("agentic", AgenticConfig, ["env.x.target=a:B", f"env.x.{key}='{{observation}} {{nope}} {{board}}'"])
    assert str(error.value) == f"env.x.{key}: unknown {{nope}}, {{board}}; known: {FIELDS}"


def test_a_number_of_turns_left_needs_a_limit() -> None:
    line = ["env.x.target=a:B", "env.x.template='{observation} {turns_left}'"]
    assert load("agentic", AgenticConfig, line).rollout.max_turns
    with pytest.raises(
        UserError, match=r"env.x.template: \{turns_left\} needs a limit of turns; set rollout.max_turns"
    ):
        load("agentic", AgenticConfig, [*line, "rollout.max_turns=null"])


def test_a_judge_s_template() -> None:
    with pytest.raises(ValueError, match=r"template: unknown \{response\}; known: \{question\}, \{truth\}, "):
        JudgeReward("http://x/v1", "m", None, template="{question} {response}")
