"""`Constraint`: tokens that may follow in an answer that must match a grammar (`rollout.constraint`).

    matcher, words = constraint.begin(), constraint.blank(1)
    matcher.fill_next_token_bitmask(words, 0)  # a bit for each token of the vocabulary
    accept(matcher, [token])

Engines draw among these tokens, and the trainer's logprobs are over the same, recomputed from the answer. The matcher
is xgrammar's (Dong et al., arXiv 2411.15100). Special tokens may only end a complete answer.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from spmd_rl.base.errors import RunFailed, UserError, one_line
from spmd_rl.base.hub import model_folder
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

BITS = 32
"""Tokens per word of a mask"""


class Allowed(NamedTuple):
    """A `logprobs.Support` of masks that rows share."""

    words: Tensor
    """int32 [D, W]: distinct masks"""
    index: Tensor
    """int64 [N]: the mask of each row"""

    def cut(self, x: Tensor, first: int, value: float) -> None:
        """Set forbidden tokens to `value`, see `Support`."""
        ids = torch.arange(first, first + x.shape[1], device=x.device)
        gone = (self.words[:, ids // BITS] >> (ids % BITS).int()) & 1 == 0
        x.masked_fill_(gone[self.index], value)


class Constraint:
    """Grammar that every answer must match."""

    def __init__(self, grammar: "CompiledGrammar") -> None:
        self.grammar = grammar

    def begin(self, token_ids: Iterable[int] = ()) -> "GrammarMatcher":
        """Return a matcher after these first tokens of an answer."""
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(self.grammar)
        accept(matcher, token_ids)
        return matcher

    def blank(self, count: int) -> Tensor:
        """Return empty masks to fill, int32 [count, W]."""
        return torch.zeros(count, -(-self.grammar.tokenizer_info.vocab_size // BITS), dtype=torch.int32)

    def replay(self, answers: Iterable[Sequence[int]]) -> Allowed:
        """Return the tokens allowed at each token of the answers, in order."""
        masks: dict[bytes, int] = {}
        index, words = [], self.blank(1)
        for token_ids in answers:
            matcher = self.begin()
            for token in token_ids:
                matcher.fill_next_token_bitmask(words, 0)
                index.append(masks.setdefault(words.numpy().tobytes(), len(masks)))
                accept(matcher, [token])
        found = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32) if masks else words
        return Allowed(found.view(-1, words.shape[1]), torch.tensor(index, dtype=torch.int64))


def accept(matcher: "GrammarMatcher", token_ids: Iterable[int]) -> None:
    """Advance the matcher. RunFailed for a forbidden token."""
    for token in token_ids:
        if not matcher.accept_token(token):
            raise RunFailed(f"rollout.constraint: token {token} of an answer breaks it")


def constraint_of(settings: ConstraintConfig, model: str, trust_remote_code: bool) -> Constraint | None:
    """Return the settings' constraint for the vocabulary of `model`, if any. UserError for a bad one."""
    return _compiled(*settings.given, model, trust_remote_code) if settings.given else None


@lru_cache(2)
def _compiled(key: str, text: str, model: str, trust_remote_code: bool) -> Constraint:
    from xgrammar import GrammarCompiler

    config = AutoConfig.from_pretrained(model_folder(model), trust_remote_code=trust_remote_code)
    tokenizer, size = load_tokenizer(model, trust_remote_code), config.get_text_config().vocab_size
    compiler = GrammarCompiler(_vocabulary(tokenizer, size, is_json=key == "json_schema"))
    try:
        if key == "json_schema":
            return Constraint(compiler.compile_json_schema(text, any_whitespace=False))
        if key == "regex":
            return Constraint(compiler.compile_regex(text))
        # Grammars quote choices like JSON strings.
        texts = [json.dumps(one, ensure_ascii=False) for one in json.loads(text)]
        return Constraint(compiler.compile_grammar(f"root ::= {' | '.join(texts)}"))
    # xgrammar raises nothing more specific.
    except RuntimeError as error:
        raise UserError(f"rollout.constraint.{key}: {one_line(error)}") from None


def _vocabulary(tokenizer: Tokenizer, size: int, is_json: bool) -> "TokenizerInfo":
    """Return each token's text as bytes, empty for special ones and those with control characters."""
    # Special tokens are not in an answer's text. One-line JSON has no control characters, but xgrammar's length-limited
    # strings allow them.
    from xgrammar import TokenizerInfo, VocabType

    stop_ids = [id for id in tokenizer.stop_ids if id < size]
    if not stop_ids:
        raise UserError(f"rollout.constraint: {tokenizer.name} has no token that ends an answer")
    found = TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=size, stop_token_ids=stop_ids)
    texts, prefix = found.decoded_vocab, found.add_prefix_space
    for id, token in tokenizer.hf.added_tokens_decoder.items():
        if id < size:
            texts[id] = b"" if token.special else token.content.encode()
    if is_json:
        texts = [b"" if min(text, default=32) < 32 else text for text in texts]
    return TokenizerInfo(texts, VocabType.RAW, vocab_size=size, stop_token_ids=stop_ids, add_prefix_space=prefix)
