"""`Constraint`: which tokens may follow in an answer that has to parse (`rollout.constraint`).

    constraint = constraint_of(cfg.rollout.constraint, cfg.policy.model, False)
    parse, words = constraint.begin(), constraint.blank(1)
    parse.allowed(words, 0)                         # a bit for each token of the vocabulary: whether it may follow
    cut_off(logits, words, 0, -math.inf)
    parse.accept([token])

Engines draw from what is left, and the trainer takes its logprobs over the same tokens: it finds them again by
following the answer's tokens, so that nothing but these passes between the two. The grammar is xgrammar's (Dong et al.,
arXiv 2411.15100). Special tokens are no text and never allowed; those that end an answer are where it is whole.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.errors import RunFailed, UserError, one_line
from spmd_rl.hub import model_folder
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

BITS = 32
"""Tokens of a word"""


class Allowed(NamedTuple):
    """Which tokens each row may have; most rows of an answer share a few masks."""

    words: Tensor
    """int32 [D, W]: the masks"""
    index: Tensor
    """int64 [N]: the mask of each row"""

    def cut(self, x: Tensor, first: int, value: float) -> None:
        """Set to `value`, in place, what is not allowed: x [N, C], of token ids from `first` on."""
        x.masked_fill_(_forbidden(self.words, first, x.shape[1])[self.index], value)


def cut_off(x: Tensor, words: Tensor, first: int, value: float) -> Tensor:
    """Set to `value`, in place, what is not allowed: x [N, C], of token ids from `first` on, words int32 [N, W]."""
    return x.masked_fill_(_forbidden(words, first, x.shape[1]), value)


def _forbidden(words: Tensor, first: int, count: int) -> Tensor:
    """bool [N, count]: which tokens from `first` on have no bit in int32 [N, W]."""
    ids = torch.arange(first, first + count, device=words.device)
    return (words[:, ids // BITS] >> (ids % BITS).int()) & 1 == 0


class Parse:
    """How far an answer has been parsed."""

    def __init__(self, grammar: "CompiledGrammar") -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar)
        self.num_tokens = 0
        """that it has been given"""

    @property
    def is_over(self) -> bool:
        """Whether a token has ended it."""
        return self._matcher.is_terminated()

    def accept(self, token_ids: Iterable[int]) -> None:
        """Take its next tokens. RunFailed for one that was not allowed."""
        for token in token_ids:
            if self.is_over or not self._matcher.accept_token(token):
                raise RunFailed(f"rollout.constraint: token {token}, number {self.num_tokens} of an answer, breaks it")
            self.num_tokens += 1

    def allowed(self, words: Tensor, row: int) -> None:
        """Write which tokens may follow into a row of int32 [N, W]."""
        self._matcher.fill_next_token_bitmask(words, row)


class Constraint:
    """What every answer has to parse as."""

    def __init__(self, grammar: "CompiledGrammar") -> None:
        """`grammar`: over the vocabulary of a model."""
        self._grammar = grammar
        self._num_words = -(-grammar.tokenizer_info.vocab_size // BITS)

    def begin(self) -> Parse:
        """The parse of an answer without tokens."""
        return Parse(self._grammar)

    def blank(self, count: int) -> Tensor:
        """int32 [count, W]: masks to be written."""
        return torch.zeros(count, self._num_words, dtype=torch.int32)

    def replay(self, answers: Iterable[Sequence[int]]) -> Allowed:
        """What was allowed in the place of each token of whole answers, one after the other."""
        masks: dict[bytes, int] = {}
        index, words = [], self.blank(1)
        for token_ids in answers:
            parse = self.begin()
            for token in token_ids:
                parse.allowed(words, 0)
                index.append(masks.setdefault(words.numpy().tobytes(), len(masks)))
                parse.accept([token])
        found = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32) if masks else words
        return Allowed(found.view(-1, self._num_words), torch.tensor(index, dtype=torch.int64))


def constraint_of(settings: ConstraintConfig, model: str, trust_remote_code: bool) -> Constraint | None:
    """The constraint of these settings over the vocabulary of `model`; None where they have none.

    UserError for one that the compiler of grammars does not know.
    """
    return _compiled(*settings.given, model, trust_remote_code) if settings.given else None


@lru_cache(2)
def _compiled(key: str, text: str, model: str, trust_remote_code: bool) -> Constraint:
    """An engine and the roles of one process share it."""
    from xgrammar import GrammarCompiler

    config = AutoConfig.from_pretrained(model_folder(model), trust_remote_code=trust_remote_code)
    tokenizer, size = load_tokenizer(model, trust_remote_code), config.get_text_config().vocab_size
    compiler = GrammarCompiler(_vocabulary(tokenizer, size, is_json=key == "json_schema"))
    compilers = {
        "json_schema": lambda: compiler.compile_json_schema(text, any_whitespace=False),
        "regex": lambda: compiler.compile_regex(text),
        "choice": lambda: compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, json.loads(text)))}"),
    }
    try:
        return Constraint(compilers[key]())
    except RuntimeError as error:  # all that xgrammar raises
        raise UserError(f"rollout.constraint.{key}: {one_line(error)}") from None


def _vocabulary(tokenizer: Tokenizer, size: int, is_json: bool) -> "TokenizerInfo":
    """The text of each of `size` tokens as bytes: none of special ones, which are not in an answer's text.

    Nor of those with a control character: JSON on one line lacks them, xgrammar's strings of limited length do not.
    """
    from xgrammar import TokenizerInfo, VocabType

    stop_ids = [id for id in tokenizer.stop_ids if id < size]
    if not stop_ids:
        raise UserError(f"rollout.constraint: {tokenizer.name} has no token that ends an answer")
    found = TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=size, stop_token_ids=stop_ids)
    texts = found.decoded_vocab
    for id, token in tokenizer.hf.added_tokens_decoder.items():
        if id < size:
            texts[id] = b"" if token.special else token.content.encode()
    if is_json:
        texts = [b"" if min(text, default=32) < 32 else text for text in texts]
    prefix = found.add_prefix_space
    return TokenizerInfo(texts, VocabType.RAW, vocab_size=size, stop_token_ids=stop_ids, add_prefix_space=prefix)


def _quoted(text: str) -> str:
    """A text as grammars write it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)
