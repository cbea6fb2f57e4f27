"""Text to token ids and back: render a prompt, decode an answer, know its stop tokens.

    tokenizer = load_tokenizer("~/.cache/spmd_rl/models/smollm2-135m-instruct")
    ids = tokenizer.render([Message("user", "2+2?")])

The chat template is followed exactly, including SmolLM2's default system message. A model without one gets the
messages' concatenated contents, after its tokenizer's first tokens (often BOS).
"""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.base.errors import UserError, one_line, tell
from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.config.ranks import rank
from spmd_rl.config.vocabulary import vocabulary_size
from spmd_rl.model.answers import answer_end, answer_spans, header_of
from spmd_rl.model.bridge import ANSWER, Bridge, find_bridge
from spmd_rl.types import PICTURE, Conversation, ImagePart, Message, Prompt
from spmd_rl.types.pictures import pictures_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spmd_rl.model.pictures import Processor

RENDERED = 4096
"""Conversations whose token ids are cached"""
MAX_CHARACTERS = 1 << 24
"""Most characters of a templated prompt"""
SHOWN_FIELDS = ("tools", "tool_calls", "reasoning_content")
"""Message fields that a model reads or writes: a chat template must use them"""
UNSEEN = "a-message-of-this-role"
TEMPLATE_FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Exceptions of faulty chat templates"""


class Tokenizer:
    """Wrapper of a Hugging Face tokenizer. stop_ids: sorted ids of tokens that end an answer."""

    stop_ids: tuple[int, ...]
    name: str
    processor: "Processor | None"
    """Processor of pictures, if the model takes them"""

    def __init__(
        self,
        hf: "PreTrainedTokenizerBase",
        stop_ids: Iterable[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: "Processor | None" = None,
    ) -> None:
        self._hf, self._template_kwargs, self.processor = hf, dict(chat_template_kwargs or {}), processor
        self._placeholder = hf.convert_ids_to_tokens(processor.placeholder) if processor else ""
        self.name = hf.name_or_path
        own = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.stop_ids = tuple(sorted({*stop_ids, *own}))
        self._rendered = lru_cache(RENDERED)(self._render)
        self._header = lru_cache(1)(partial(header_of, self._chat_text))
        self._ends = lru_cache(1)(lambda: [self.visible([id]) for id in self.stop_ids])
        self._answer_end = lru_cache(1)(lambda: answer_end(self._chat_text, self._ends()))
        self._bridge = lru_cache(RENDERED)(self._find_bridge)
        self._shown_roles: set[tuple[str, bool]] = set()
        self._warned = False
        self._hidden = _hidden_ids(hf, self.stop_ids)
        # Rows are checked against `data.max_tokens` and prompts against `rollout.max_prompt_tokens`.
        hf.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        # transformers' own wrapper would take twice the time of the decoding, and twice a sample.
        backend = getattr(hf, "backend_tokenizer", None)
        self._decode = partial(hf.decode, clean_up_tokenization_spaces=False) if backend is None else backend.decode

    @property
    def hf(self) -> "PreTrainedTokenizerBase":
        """Hugging Face tokenizer, for other packages."""
        return self._hf

    def render(self, messages: Sequence[Message]) -> array:
        """Return token ids ('i') of a conversation, up to the model's answer. UserError of the template.

        The result is cached, and must not be changed.
        """
        return self._rendered(tuple(messages))

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """Return the text between two answers, with `messages` in between."""
        return self._bridge(tuple(messages))

    def pieces(self, conversation: Conversation) -> list[tuple[array, array]]:
        """Return token ids ('i') of a conversation: given and learnt parts in turns. UserError of the template.

        Parts are encoded separately, so that no token crosses a border.
        """
        messages, num_given = conversation.messages, conversation.num_given
        if conversation.is_plain or not self._hf.chat_template:
            pieces = self._plain_pieces(messages, num_given)
        else:
            how = self._header(), self._ends(), self._answer_end()
            text, spans = answer_spans(self._chat_text, messages, num_given, *how)
            parts = self._encode_parts(text, [0, *chain(*spans)], messages)
            pieces = [*zip(parts[::2], parts[1::2], strict=True)]
            if any(id < 0 for _, learnt in pieces for id in learnt):
                raise UserError("a picture in an answer of the model cannot be learnt")
        if not self._warned and any(learnt[-1] not in self.stop_ids for _, learnt in pieces if learnt):
            self._warned = True
            line = f"no token that ends generation ({', '.join(self._ends())}) follows an answer in its chat template"
            if rank() == 0:
                tell(f"warning: {self.name}: {line}: the end of an answer is not trained on")
        # The first token of a text has no prediction.
        if pieces and not pieces[0][0]:
            pieces[0] = pieces[0][1][:1], pieces[0][1][1:]
        return pieces

    def scored_pieces(self, conversation: Conversation) -> list[tuple[array, array]]:
        """Return a conversation for a reward model, and one token after it, before which the value is the reward.

        For an answer in steps, each step's reward is before the next one's first token. Parts are encoded separately.
        """
        messages, borders = conversation.messages, conversation.borders
        answer, ends = _text(messages[-1]), array("i", self.stop_ids[:1] or [0])
        if conversation.is_plain or not self._hf.chat_template:
            (given, *_), begin = self._plain_pieces(messages, len(messages) - 1)[0], 0
            steps = [given, *self._encode_parts(answer, [0, *borders, len(answer)], ())]
            steps[:2] = [steps[0] + steps[1]]
            steps[-1] += array("i", [] if self._hf.eos_token_id is None else [self._hf.eos_token_id])
        else:
            text = self._chat_text(messages, False)
            begin = text.rfind(answer) if borders else 0
            if begin < 0:
                raise UserError(f"the model's chat template ({self.name}) changes an answer that is divided into steps")
            steps = self._encode_parts(text, [0, *(begin + border for border in borders), len(text)], messages)
        learnt = [*(step[:1] for step in steps[1:]), ends]
        return [(step[bool(number) :], one) for number, (step, one) in enumerate(zip(steps, learnt, strict=True))]

    def _encode_parts(self, text: str, borders: Sequence[int], messages: Sequence[Message]) -> list[array]:
        parts = [text[a:b] for a, b in pairwise(borders)]
        if self.processor is None:
            return [self.encode(part) for part in parts]
        pictures = iter(pictures_of(messages))
        return [self._encode(part, tuple(islice(pictures, part.count(self._placeholder)))) for part in parts]

    def _encode(self, text: str, pictures: tuple[bytes, ...]) -> array:
        if self.processor is None:
            return self.encode(text)
        expanded = self.processor.expand(text, self._placeholder, pictures)
        return self.processor.mark(self.encode(expanded), pictures)

    def _find_bridge(self, messages: tuple[Message, ...]) -> Bridge:
        return find_bridge(self._chat_text, partial(self._encode, pictures=pictures_of(messages)), messages)

    @property
    def pad_id(self) -> int | None:
        """Token that only pads texts, if any."""
        pad = self._hf.pad_token_id
        ending = self.scored_pieces(Conversation((Message("user", ANSWER), Message("assistant", ANSWER))))[0][0][-1]
        return None if pad == ending else pad

    def _plain_pieces(self, messages: Sequence[Message], num_given: int) -> list[tuple[array, array]]:
        pieces, given = [], ""
        for number, message in enumerate(messages):
            if number < num_given or message.role != "assistant" or not message.is_learnt:
                given += _text(message)
                continue
            ids = self.encode(_text(message))
            if number == len(messages) - 1 and self._hf.eos_token_id is not None:
                ids.append(self._hf.eos_token_id)
            pieces.append((self.encode(given) if pieces else array("i", self._hf(given).input_ids), ids))
            given = ""
        return pieces

    def _render(self, messages: tuple[Message, ...]) -> array:
        text = self._chat_text(messages)
        if not self._hf.chat_template:
            return array("i", self._hf(text).input_ids)
        # The template has written its special tokens itself, including BOS.
        return self._encode(text, pictures_of(messages))

    def _chat_text(self, messages: Sequence[Message], prompts: bool = True) -> str:
        """Return a conversation's text, by default up to the model's answer. UserError if the template refuses it,
        or drops a message or its tools."""
        if any(message.fields for message in messages):
            self._check_fields(messages)
        if not self._hf.chat_template:
            return "".join(map(_text, messages))
        text = self._templated(messages, prompts)
        for number, message in enumerate(messages):
            if (message.role, number == 0) not in self._shown_roles:
                self._check_role(messages, number, prompts)
        return text

    def _templated(self, messages: Sequence[Message], prompts: bool) -> str:
        from jinja2 import TemplateError

        content = _text if self.processor is None else _parts
        chat = [{"role": m.role, "content": content(m), **m.others} for m in messages]
        tools = chat[0].pop("tools", None) if chat else None
        how = {"tokenize": False, "add_generation_prompt": prompts, **self._template_kwargs}
        try:
            text = self._hf.apply_chat_template(chat, tools=tools, **how)
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise UserError(f"the model's chat template refuses the roles ({roles}): {error}") from None
        except TEMPLATE_FAILURES as error:
            raise UserError(f"the model's chat template ({self.name}) fails: {one_line(error)}") from None
        if self.processor:
            self._check_places(text, sum(part["type"] == "image" for one in chat for part in one["content"]))
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the model's chat template ({self.name}) makes {len(text)} characters out of one prompt")
        return text

    def _check_places(self, text: str, num_pictures: int) -> None:
        if (count := text.count(self._placeholder)) != num_pictures:
            raise UserError(
                f"the text has {count} times {self._placeholder}, which the model takes for a picture, and "
                f"{num_pictures} pictures: a text must not have it, and the chat template ({self.name}) must"
            )

    def _check_fields(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages, 1):
            unused = [name for name in SHOWN_FIELDS if name not in str(self._hf.chat_template)]
            if name := next(filter(message.others.get, unused), None):
                raise UserError(
                    f"{'the row' if name == 'tools' else f'message {number}'} has `{name}`, for which the model's chat "
                    f"template ({self.name}) has no place: move them into a message's `content`, or remove them"
                )

    def _check_role(self, messages: Sequence[Message], number: int, prompts: bool) -> None:
        """Render a known word as a message's content. UserError if the template drops it."""
        # Called once for the role in the first message and once later: templates may treat the first one differently.
        role = messages[number].role
        marked = [*messages[:number], messages[number].saying(UNSEEN), *messages[number + 1 :]]
        if UNSEEN not in self._templated(marked, prompts):
            raise UserError(
                f"message {number + 1} has the role `{role}`, which the model's chat template ({self.name}) leaves "
                "out: name it as the template does (mostly `user`, `assistant`, `system`)"
            )
        self._shown_roles.add((role, number == 0))

    def visible(self, ids: Iterable[int]) -> str:
        """Return text with special tokens, and `<image>` for a picture."""
        runs = groupby(ids, lambda id: id < 0)
        return "".join(PICTURE if seen else self._decode(list(run), skip_special_tokens=False) for seen, run in runs)

    def encode(self, text: str) -> array:
        """Return token ids ('i') of a text, without special tokens around it."""
        return array("i", self._hf(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return text for rewards and stop strings, without special tokens but those added for the model to write
        (`<answer>`)."""
        # Cleanup of spaces would change code and mathematics.
        if self._hidden is None:
            return self._decode(list(ids), skip_special_tokens=True)
        return self.visible([id for id in ids if id not in self._hidden])


def _hidden_ids(hf: "PreTrainedTokenizerBase", stop_ids: Sequence[int]) -> set[int] | None:
    """Return the special tokens that are no answer text: all but additional ones without another purpose. None: all
    are hidden."""
    special = {id for id, token in hf.added_tokens_decoder.items() if token.special}
    used = {*hf.convert_tokens_to_ids([*hf.special_tokens_map.values()]), *stop_ids}
    shown = set(hf.convert_tokens_to_ids([*hf.extra_special_tokens])) & special - used
    return special - shown if shown else None


def _text(message: Message) -> str:
    try:
        return message.text
    except ValueError:
        raise UserError("policy.model: a prompt holds an image, which needs a processor; this model has none") from None


def _parts(message: Message) -> list[dict[str, str]]:
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in message.content
    ]


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Return a model's tokenizer; never downloads. UserError: no directory, no tokenizer, or a broken one.

    chat_template_kwargs: variables of the template (`enable_thinking`); unused ones are an error.
    """
    from transformers import AutoTokenizer

    folder = model_folder(path)
    if not folder.is_dir():
        raise UserError(f"no such model directory: {folder}")
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    # transformers raises all of these for broken files.
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        if "trust_remote_code" in str(error):
            reason = "it brings Python code of its own; policy.trust_remote_code=true would run it"
        raise UserError(f"cannot load the tokenizer of {folder}: {reason}") from error
    ends = _eos_ids(folder)
    _check_size(hf, folder)
    if chat_template_kwargs:
        _check_variables(chat_template_kwargs, hf.chat_template, folder)
    return Tokenizer(hf, ends, chat_template_kwargs, _build_processor(folder))


def _build_processor(folder: Path) -> "Processor | None":
    if not sees_pictures(folder):
        return None
    # Runs of text alone have neither the import nor Pillow.
    from spmd_rl.model.pictures import build_processor

    return build_processor(folder)


def _check_size(hf: "PreTrainedTokenizerBase", folder: Path) -> None:
    # Tokens of images and the like may lack a row: no text has them.
    size = vocabulary_size(folder) if (folder / "config.json").is_file() else None
    # Those of the object have its names for images too.
    own = type(hf).SPECIAL_TOKENS_ATTRIBUTES
    named = [str(token) for name, token in hf.special_tokens_map.items() if name not in own]
    added = [(id, str(token)) for id, token in hf.added_tokens_decoder.items() if str(token) not in named]
    id, token = max([*added, (hf.vocab_size - 1, "its last one")])
    if size is not None and id >= size:
        raise UserError(
            f"the tokenizer of {folder} has more tokens than its model, which has {size}: {token!r} is number {id}; "
            "give the model rows for them (resize_token_embeddings) or remove them from the tokenizer"
        )


def render_prompt(tokenizer: Tokenizer, prompt: Prompt) -> array:
    """Return a prompt's token ids ('i'). UserError of the template, naming the row."""
    try:
        return tokenizer.render(prompt.messages)
    except UserError as error:
        raise UserError(f"{prompt.where or prompt.id}: {error}") from None


def _check_variables(given: Mapping[str, Any], template: str | None, folder: Path) -> None:
    # A misspelt `enable_thinking` would silently change nothing.
    from jinja2 import Environment, TemplateError, meta

    if not isinstance(template, str):
        raise UserError(f"data.chat_template_kwargs: {folder} has no chat template, or several")
    try:
        used = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:
        # A tag of transformers such as `generation`, unknown to plain jinja.
        return
    if unused := [name for name in given if name not in used]:
        known = ", ".join(sorted(used - {"messages", "add_generation_prompt"})) or "none"
        raise UserError(
            f"data.chat_template_kwargs.{unused[0]}: the chat template of {folder} does not use it (it uses: {known})"
        )


def _eos_ids(folder: Path) -> set[int]:
    # generation_config.json and config.json often differ, so both count.
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            data = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise UserError(f"{folder / name}: {error}") from None
        ids = data.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found
