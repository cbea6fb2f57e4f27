"""The bridge between turns under real families' templates: append-only, closed, and refused where it cannot be."""

from array import array

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmd_rl.base.errors import UserError
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.episode import Budget, Context, Sampling
from spmd_rl.types import Message, Prompt, Turn

END, OTHER_END = "<|end|>", "<|eot|>"
LOOP = "{% for m in messages %}"
GENERATE = "{% if add_generation_prompt %}"
CHATML = (
    "{% if messages[0].role != 'system' %}<|im|>system\nBe kind.<|end|>\n{% endif %}"
    + LOOP
    + "<|im|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    + GENERATE
    + "<|im|>assistant\n{% endif %}"
)
LLAMA3 = (
    LOOP
    + "{{ '<s>' if loop.first else '' }}<|im|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    + GENERATE
    + "<|im|>assistant\n\n{% endif %}"
)
GEMMA = (
    "<s>"
    + LOOP
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + "<|im|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    + GENERATE
    + "<|im|>model\n{% endif %}"
)
MISTRAL = (
    "<s>"
    + LOOP
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    + LOOP
    + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + LOOP
    + "{% set words = m.content %}{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in words %}"
    + "{% set words = words.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    + "<|im|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ words }}<|end|>\n{% endfor %}"
    + GENERATE
    + "<|im|>assistant\n{% endif %}"
)
THINKS = QWEN3.replace("<|im|>assistant\n{% endif %}", "<|im|>assistant\n<think>\n{% endif %}")
LAST_ASKED = (
    "{% set n = messages | length %}"
    + LOOP
    + "{% if m.role == 'user' %}[INST] {{ 'Be kind. ' if loop.index0 == n - 1 else '' }}{{ m.content }} [/INST]"
    + "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
APPEND_ONLY = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3, "base": None}
QUESTION, MORE = Message("user", "2+2?"), Message("user", "Really?")


def make(template: str | None) -> Tokenizer:
    """Bytes, and special tokens of which two end an answer."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im|>", END, OTHER_END])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, bos_token="<s>")
    hf.chat_template, hf.name_or_path = template, "some/model"
    return Tokenizer(hf, hf.convert_tokens_to_ids([END, OTHER_END]))


def after(tokenizer: Tokenizer, answer: str) -> Context:
    """A conversation in which the model has answered QUESTION."""
    prompt = Prompt("0" * 32, (QUESTION,), "toy", "4")
    ctx = Context(prompt, 0, 0, None, Sampling(0, "train", 1.0, 9), Budget(99), tokenizer, None, None)
    numbers = array("f"), array("i")
    ids = tokenizer.encode(answer)
    ctx.turns.append(Turn(ctx.render([QUESTION]), ids, *numbers, "stop", tokenizer.decode(ids)))
    return ctx


def said(ctx: Context, *more: array) -> array:
    """All tokens so far."""
    return sum([ctx.turns[0].prompt_ids, ctx.turns[0].token_ids, *more], array("i"))


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_turns_are_the_tokens_of_the_whole_conversation_rendered_once(name):
    tokenizer = make(APPEND_ONLY[name])
    end = "" if name == "base" else END
    for answer in ("Four.", "Fou") if name != "mistral" else (" Four.", " Fou"):  # the template's space is sampled
        whole = tokenizer.render([QUESTION, Message("assistant", answer.strip()), MORE])
        cut_off, ended = after(tokenizer, answer), after(tokenizer, answer + end)
        assert said(cut_off, cut_off.reply([MORE])) == said(ended, ended.reply([MORE])) == whole
        assert said(ended) == whole[: len(said(ended))] and len(said(ended)) == len(said(cut_off)) + bool(end)


def test_a_default_system_prompt_stands_at_the_beginning_alone():
    ctx = after(make(CHATML), "Four.")
    assert "Be kind" in ctx.tokenizer.decode(ctx.render([QUESTION]))
    assert ctx.tokenizer.decode(ctx.reply([MORE])) == "\nuser\nReally?\nassistant\n"


def test_another_end_token_is_followed_by_that_of_the_template():
    ctx = after(make(CHATML), "Four." + OTHER_END)
    assert said(ctx, ctx.reply([MORE])) == said(ctx, ctx.tokenizer.encode(END), after_end(ctx))


def after_end(ctx: Context) -> array:
    return ctx.tokenizer.encode("\n<|im|>user\nReally?<|end|>\n<|im|>assistant\n")


THOUGHT = "<think>\nIt is four.\n</think>\n\nFour."


def test_a_template_that_drops_thoughts_is_refused_where_there_are_any():
    ctx = after(make(QWEN3), THOUGHT + END)
    with pytest.raises(UserError, match=r"^policy.model: the chat template of some/model leaves out the thoughts"):
        ctx.reply([MORE])
    assert said(ctx, ctx.reply([MORE], as_sampled=True)) == said(ctx, after_end(ctx))
    assert ctx.reply([Message("tool", "4")])  # between tool calls the thoughts stay
    ctx = after(make(THINKS), "It is four.\n</think>\n\nFour." + END)  # where the template begins the thought
    with pytest.raises(UserError, match="leaves out the thoughts of earlier answers once another message follows"):
        ctx.reply([MORE])
    tool = Message("tool", "4")
    assert said(ctx, ctx.reply([tool])) == ctx.tokenizer.render([QUESTION, Message("assistant", THOUGHT), tool])


def test_a_template_that_changes_what_was_said_before_is_refused():
    with pytest.raises(UserError, match="some/model renders earlier answers differently once another message follows"):
        after(make(LAST_ASKED), "Four." + END).reply([MORE])
    with pytest.raises(UserError, match="the role `assistant`, which the model.s chat template .* leaves out"):
        after(make("{{ messages[-1].content }}"), "Four.").reply([MORE])
    with pytest.raises(UserError, match="refuses the roles .user, assistant, assistant.: roles must alternate"):
        after(make(GEMMA), "Four.").reply([Message("assistant", "x")])


def test_a_reply_follows_an_answer():
    ctx = after(make(CHATML), "")
    ctx.turns.clear()
    with pytest.raises(ValueError, match="begins with ctx.render"):
        ctx.reply([MORE])
