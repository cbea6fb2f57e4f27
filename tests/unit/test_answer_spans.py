"""What is learnt of a whole conversation: the answers and the tokens that end them, under real families' templates.

The reference is what transformers makes of the whole conversation, in one rendering.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from spmd_rl.base.errors import UserError
from spmd_rl.types import Conversation, Message
from tests.templates import FAMILIES, tokenizer

THOUGHT = "<think>\nIt is (four).\n\nYes.\n</think>\n\n"
BOS = {name: {"bos_token": FAMILIES[name].others[0]} for name in FAMILIES}
NAMES = ("smollm2", "llama3", "qwen2.5", "qwen3")
USER, TOOL = Message("user", "2+2?"), Message("tool", "4")


def learnt(name: str, messages, num_given: int = 0, **template_kwargs) -> list[str]:
    """The texts of what is learnt; what is given and what is learnt are together the conversation."""
    t = tokenizer(name, **template_kwargs)
    pieces = t.pieces(Conversation(tuple(messages), num_given))
    joined = "".join(t.visible([*given, *ids]) for given, ids in pieces)
    whole = whole_text(name, messages, **template_kwargs)
    rest = whole.removeprefix(joined)
    assert whole.startswith(joined) and (messages[-1].role != "assistant" or not rest.strip())
    return [t.visible(ids) for _, ids in pieces]


def whole_text(name: str, messages, **template_kwargs) -> str:
    """What transformers makes of the conversation."""
    chat = [{"role": m.role, "content": m.content} for m in messages]
    more = BOS[name] | template_kwargs
    (text,), _ = render_jinja_template([chat], chat_template=FAMILIES[name].template, **more)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_and_its_end_are_learnt(name: str) -> None:
    end = FAMILIES[name].end
    messages = [Message("system", "Be brief."), USER, Message("assistant", "Four."), USER, Message("assistant", "4")]
    empty = "<think>\n\n</think>\n\n" * (name == "qwen3")
    assert learnt(name, messages) == [f"Four.{end}", f"{empty}4{end}"]
    assert learnt(name, messages, num_given=4) == [f"{empty}4{end}"]


texts = st.lists(
    st.sampled_from(["Four", " use", "user", ".", "\n\n", " ", "<|im", "é", "assistant", "\n"]), max_size=6
)
contents = texts.map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=5))
def test_whatever_they_say(name: str, turns) -> None:
    """The contents are the template's: Llama's trims them."""
    messages = [Message(role, text) for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    kept = [answer.strip() if name == "llama3" else answer for _, answer in turns]
    if name == "qwen3":
        kept = [*kept[:-1], "<think>\n\n</think>\n\n" + kept[-1].lstrip("\n")]
    assert learnt(name, messages) == [text + FAMILIES[name].end for text in kept]


def test_thoughts_are_learnt_where_the_template_keeps_them() -> None:
    end, said = "<|im_end|>", Message("assistant", THOUGHT + "Four.")
    assert learnt("qwen3", [USER, said, USER, said]) == [f"Four.{end}", f"{THOUGHT}Four.{end}"]
    assert learnt("qwen3", [USER, said, TOOL, said]) == [f"{THOUGHT}Four.{end}"] * 2
    assert learnt("qwen3-keeps", [USER, said, USER, said, USER]) == [f"{THOUGHT}Four.{end}"] * 2


def test_an_empty_thought_of_the_prompt_is_given() -> None:
    short = Message("assistant", "Four.")
    assert learnt("qwen3", [USER, short, USER, short], enable_thinking=False) == ["Four.<|im_end|>"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_the_one_that_the_policy_will_see(name: str) -> None:
    t = tokenizer(name)
    ((given, ids),) = t.pieces(Conversation((USER, Message("assistant", "Four.")), 1))
    assert given == t.render([USER]) and t.visible(ids).endswith("Four." + FAMILIES[name].end)


def test_a_template_that_changes_what_follows_an_answer_is_refused() -> None:
    t = tokenizer("smollm2")
    t._hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content | length }}"
    with pytest.raises(UserError, match="answer in message 2 cannot be located"):
        t.pieces(Conversation((USER, Message("assistant", "Four."))))


def test_texts_without_a_template() -> None:
    t = tokenizer("llama3")
    text = Conversation((Message("assistant", "Once upon"),), is_plain=True)
    ((given, ids),) = t.pieces(text)
    assert t.visible(given) == "O" and t.visible(ids) == "nce upon<|eot_id|>", "nothing predicts the first token"
    pair = Conversation((Message("user", "2+2="), Message("assistant", "4")), 1, is_plain=True)
    ((given, ids),) = t.pieces(pair)
    assert (t.visible(given), t.visible(ids)) == ("2+2=", "4<|eot_id|>")


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_reads_the_whole_conversation_as_it_is(name: str) -> None:
    t, messages = tokenizer(name), (USER, Message("assistant", "Four."))
    ((ids, added),) = t.scored_pieces(Conversation(messages))
    assert t.visible(ids) == whole_text(name, messages) and len(added) == 1
    assert t.pad_id != ids[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_of_steps_reads_each_step_by_itself(name: str) -> None:
    t, messages = tokenizer(name), (USER, Message("assistant", "Two.\n\nTwo more.\n\n\n\nFour."))
    pieces = t.scored_pieces(Conversation(messages).in_steps("\n\n"))
    ids = [token for pair in pieces for part in pair for token in part]
    assert t.visible(ids[:-1]) == whole_text(name, messages) and [len(learnt) for _, learnt in pieces] == [1, 1, 1]
    ends = [t.visible(ids[: sum(len(part) for pair in pieces[: n + 1] for part in pair) - 1]) for n in range(2)]
    assert [end.rpartition("Two")[1:] for end in ends] == [("Two", ".\n\n"), ("Two", " more.\n\n\n\n")]
    assert t.scored_pieces(Conversation(messages)) == t.scored_pieces(Conversation(messages).in_steps("###"))
