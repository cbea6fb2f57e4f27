"""Conversations of many turns under real families' templates: their tokens are those of one rendering of the whole."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.base.errors import UserError
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.episode import Budget, Context, Sampling
from spmd_rl.types import Message, Prompt, Turn
from tests.templates import FAMILIES, tokenizer

TOKENIZERS = {name: tokenizer(name) for name in FAMILIES}
THOUGHT = "<think>\nIt is (four).\n\nYes.\n</think>\n\n"

pieces = st.sampled_from(
    ["Four", "use user", " the", ".", ").", "\n", "\n\n", " ", "  \n", ">", "<answer>", "é", "'s", "12"]
)
texts = st.lists(pieces, max_size=8).map("".join)
answers = texts.map(str.strip)  # the templates of Llama and Gemma strip them
endings = st.sampled_from(["ended", "length", "stop string"])


def begin(tokenizer: Tokenizer, messages: Sequence[Message]) -> Context:
    """A conversation whose answers are given by `answer`."""
    prompt = Prompt("0" * 32, tuple(messages), "toy", "4")
    return Context(prompt, 0, 0, None, Sampling(0, "train", 1.0, 9), Budget(99), tokenizer, None, None)


def answer(ctx: Context, prompt_ids: array, text: str, ending: str = "ended") -> None:
    """Let the policy have sampled a text after these tokens, and its end token if it ended by itself."""
    end = FAMILIES[ctx.tokenizer.name].end if ending == "ended" else ""
    ids = ctx.tokenizer.encode(text + end)
    reason = "length" if ending == "length" else "stop"
    ctx.turns.append(Turn(prompt_ids, ids, array("f"), array("i"), reason, ctx.tokenizer.decode(ids)))


def tokens(ctx: Context) -> array:
    """All tokens so far."""
    return sum([ids for turn in ctx.turns for ids in (turn.prompt_ids, turn.token_ids)], array("i"))


def play(tokenizer: Tokenizer, first: list[Message], turns: list[tuple[str, str, list[Message]]]) -> None:
    """Check the tokens of a conversation after each of its turns: (answer, how it ended, the messages that follow)."""
    ctx, told, prompt_ids = begin(tokenizer, first), list(first), tokenizer.render(first)
    for text, ending, following in turns:
        answer(ctx, prompt_ids, text, ending)
        told += [Message("assistant", text), *following]
        assert ctx.can_reply(following)
        prompt_ids = ctx.reply(following)
        assert tokens(ctx) + prompt_ids == tokenizer.render(told)
    sampled = [tokenizer.encode(text + FAMILIES[tokenizer.name].end * (how == "ended")) for text, how, _ in turns]
    assert [turn.token_ids for turn in ctx.turns] == sampled, "loss is on these alone, whatever stands between them"


def following(name: str) -> st.SearchStrategy[list[Message]]:
    """Messages between two answers, in the roles that the template has."""
    roles = FAMILIES[name].roles
    most = 1 if roles == ("user",) else 3  # where roles must alternate
    return st.lists(st.builds(Message, st.sampled_from(roles), texts), min_size=1, max_size=most)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_joined_turns_are_the_whole_conversation_rendered_once(name, data):
    system = [] if name == "gemma2" else data.draw(st.lists(st.builds(Message, st.just("system"), texts), max_size=1))
    turn = st.tuples(answers, endings, following(name))
    turns = data.draw(st.lists(turn, min_size=1, max_size=6))
    play(TOKENIZERS[name], [*system, Message("user", data.draw(texts))], turns)


def test_where_thoughts_stay_turns_go_on():
    user, tool = [Message("user", "Really?")], [Message("tool", "4\n")]
    for text in ("Four.", THOUGHT + "Four."):
        play(TOKENIZERS["qwen3-keeps"], user, [(text, "ended", user), (text, "length", tool), (text, "ended", user)])


def test_qwen3_keeps_thoughts_between_tools_and_drops_them_before_a_question():
    user, tool = [Message("user", "2+2?")], [Message("tool", "4"), Message("tool", "four\n")]
    play(TOKENIZERS["qwen3"], user, [(THOUGHT + "Four.", "ended", tool), (THOUGHT + "So it is.", "length", tool)])
    ctx = begin(TOKENIZERS["qwen3"], user)
    answer(ctx, ctx.render(user), THOUGHT + "Four.")
    assert ctx.can_reply(tool) and not ctx.can_reply(user)
    with pytest.raises(UserError, match="leaves out the thoughts"):
        ctx.reply(user)
    ctx.begin_segment()
    answer(ctx, ctx.render([*user, Message("assistant", THOUGHT + "Four."), *user]), "Four, as I said.")
    assert ctx.can_reply(user), "the thoughts of the segment before are not in this one"
    ctx.begin_segment()
    answer(ctx, ctx.render(user), "<think>\nIt is f", "length")
    assert ctx.can_reply(user), "a thought that was cut off is text to the template"


@pytest.mark.parametrize(("thinking", "goes_on"), [(True, True), (False, False)])
def test_qwen3_told_not_to_think(thinking, goes_on):
    """Its prompt then ends with an empty thought, which the next prompt leaves out: each turn begins a segment."""
    qwen = tokenizer("qwen3", enable_thinking=thinking)
    user, tool = [Message("user", "2+2?")], [Message("tool", "4")]
    assert qwen.visible(qwen.render(user)).endswith("assistant\n" + "<think>\n\n</think>\n\n" * (not thinking))
    ctx = begin(qwen, user)
    answer(ctx, ctx.render(user), "Four.")
    assert ctx.can_reply(user) == ctx.can_reply(tool) == goes_on
    if goes_on:
        play(qwen, user, [("Four.", "ended", user), ("Four", "length", user)])


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("smollm2", ["<|im_end|>", "\n", "<|im_start|>", "user", "\n"]),
        ("llama3", ["<|eot_id|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\n"]),
        ("gemma3", ["<end_of_turn>", "\n", "<start_of_turn>", "user", "\n"]),
        ("qwen2.5", ["<|im_end|>", "\n", "<|im_start|>", "user", "\n"]),
    ],
)
def test_what_the_template_adds_is_not_the_policys(name, ids):
    """The end token where it is missing, and the newline after it, stand in the next turn's prompt: mask 0."""
    t = TOKENIZERS[name]
    user = [Message("user", "Really?")]
    for ending, added in (("length", ids), ("stop string", ids), ("ended", ids[1:])):
        ctx = begin(t, user)
        answer(ctx, ctx.render(user), "Four", ending)
        assert [t.visible([id]) for id in ctx.reply(user)[: len(added)]] == added


def test_a_system_prompt_stands_at_the_beginning_alone():
    for name, t in TOKENIZERS.items():
        ctx = begin(t, [Message("user", "2+2?")])
        answer(ctx, ctx.render(ctx.prompt.messages), "Four.")
        said = t.visible(ctx.reply([Message("user", "Really?")]))
        assert "system" not in said and "You are" not in said and said.count("Really?") == 1
        assert said.endswith("model\n" if "gemma" in name else "\n") and ("assistant" in said) == ("gemma" not in name)


def test_gemma_has_no_tools():
    ctx = begin(TOKENIZERS["gemma3"], [Message("user", "2+2?")])
    answer(ctx, ctx.render(ctx.prompt.messages), "Four.")
    with pytest.raises(UserError, match="refuses the roles .user, assistant, tool"):
        ctx.reply([Message("tool", "4")])


def test_an_answer_keeps_the_tokens_it_was_sampled_with():
    """Rendered again, its first newline would merge with that of the template; the text is the same."""
    t, user = TOKENIZERS["smollm2"], [Message("user", "Really?")]
    ctx = begin(t, user)
    answer(ctx, ctx.render(user), "\nFour.")
    joined = tokens(ctx) + ctx.reply(user)
    once = t.render([*user, Message("assistant", "\nFour."), *user])
    assert joined != once and t.visible(joined) == t.visible(once)
