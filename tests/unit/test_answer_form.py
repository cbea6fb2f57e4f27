"""The form that a prompt asks for, read out of what real instructions say, filled with a known answer."""

import pytest

from spmd_rl.tools.answer_form import SLOT, THOUGHT, asked_forms, fill
from spmd_rl.types import Message, Prompt

ASKED = {
    "{question}\nThink step by step, then put the final answer in \\boxed{}.": f"{THOUGHT}\n\\boxed{{18}}",
    "{question} Don't forget to wrap it in $\\boxed{answer}$.": "\\boxed{18}",
    '{question} Let\'s think step by step and output the final answer after "####".': f"{THOUGHT}\n#### 18",
    "{question}\nEnd with #### n": "#### 18",
    "Enclosed within <think> </think> and <answer> </answer> tags, i.e., <think> reasoning here </think> "
    "<answer> answer here </answer>. {question}": f"<think>{THOUGHT}</think> <answer>18</answer>",
    "Respond so:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n{question}":
        f"<reasoning>\n{THOUGHT}\n</reasoning>\n<answer>\n18\n</answer>",
    "{question} Write your thoughts in <think> tags and the answer in \\boxed{}.":
        f"<think>{THOUGHT}</think>\n\\boxed{{18}}",
    "{question} Put it in <answer> tags, in \\boxed{}.": "<answer>\\boxed{18}</answer>",
    "{question} Put the query between <sql> and </sql>": "<sql>18</sql>",
    "The last line of your response should be of the form Answer: $Answer (without quotes). {question}":
        f"{THOUGHT}\nAnswer: 18",
    "{question} Your last line: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD.":
        f"{THOUGHT}\nAnswer: 18",
    '{question} Finish with "The answer is X."': "The answer is 18.",
    '{question} Finish with "The answer is (X)."': "The answer is (18).",
    "{question} End with **Answer:** X": "**Answer:** 18",
    "{question} Write: The final answer is [answer].": "The final answer is 18",
    "{question} Answer: \\boxed{<number>}": "Answer: \\boxed{18}",
    '{question} Give the rating as "[[rating]]".': "[[18]]",
    "{question}\n```python\n# YOUR CODE\n```": "```python\n18\n```",
    "{question} Write it in a fenced code block.": "```\n18\n```",
    '{question} Reply in JSON: {"reasoning": "...", "answer": "..."}': f'{{"reasoning": "{THOUGHT}", "answer": "18"}}',
    '{question} Reply in JSON: {"answer": 42}': '{"answer": 18}',
    '{question} Reply with a JSON object with the key "answer".': '{"answer": "18"}',
}  # fmt: skip
NOTHING = (
    "{question}",
    "{question}\nReply with the number only.",
    "{question} Do not use \\boxed{}; write the number only.",
    "{question}\nAnswer:",
    "### Instruction:\n{question}\n\n### Response:",
)


def prompt(*texts: str, role: str = "user") -> Prompt:
    return Prompt("0" * 32, tuple(Message(role, text) for text in texts), "math", "18")


@pytest.mark.parametrize("template", ASKED)
def test_an_instruction_is_filled_with_the_answer(template: str) -> None:
    row = prompt(template.replace("{question}", "Is <b>3</b> + 15 a number?"))
    assert ASKED[template] in [fill(form, "18") for form in asked_forms(row, template)]


@pytest.mark.parametrize("template", NOTHING)
def test_words_that_name_no_form(template: str) -> None:
    assert asked_forms(prompt(template.replace("{question}", "Is <b>3</b> + 15 'the result'?")), template) == []


def test_whose_words_count() -> None:
    system, question = Message("system", "Use \\boxed{}."), Message("user", "Is it 'The answer is X'? End with #### n")
    asked = asked_forms(Prompt("0" * 32, (system, question), "math", "18"))
    assert asked == ["\\boxed{\0}"]  # data.system, before the row's own
    shots = (Message("user", "1 + 1? End with #### n"), Message("assistant", "\\boxed{2}"), Message("user", "2 + 2?"))
    assert asked_forms(Prompt("0" * 32, shots, "math", "4"), "{question} In <answer> tags.") == [f"#### {SLOT}"]


def test_an_answer_that_has_its_mark_stays() -> None:
    assert fill("```python\n\0\n```", "```python\nx = 1\n```") == "```python\nx = 1\n```"
    assert fill("\\boxed{\0}", "\\boxed{18}") == "\\boxed{18}"
