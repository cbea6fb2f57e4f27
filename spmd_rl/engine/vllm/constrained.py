"""Answers that have to parse, on vLLM: its structured outputs, with our `Constraint` in the place of its compilers.

So that one function says everywhere which tokens may follow, and vLLM needs no tokenizer for it. What a request says of
its grammar is what of its answer has been begun.
"""

import json

from torch import Tensor
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from spmd_rl.model.constraint import Constraint, Parse
from spmd_rl.types import Request


def constrain(llm: LLMEngine, constraint: Constraint) -> None:
    """Let a started vLLM hold its answers to a constraint: those of requests with `grammar_of`."""
    llm.input_processor.structured_outputs_config = None  # by which it would look for a tokenizer of its own
    llm.engine_core.engine_core.structured_output_manager.backend = _Backend(constraint)


def grammar_of(request: Request) -> StructuredOutputsParams:
    """What a request says of its grammar."""
    begun = request.prompt_ids[len(request.prompt_ids) - request.num_begun :]
    return StructuredOutputsParams(grammar=json.dumps(begun.tolist()))


class _Backend(StructuredOutputBackend):
    """What vLLM asks for grammars and masks."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def compile_grammar(
        self, request_type: object, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """The parse of an answer, of which `grammar_of` says what is begun."""
        parse = self._constraint.begin()
        parse.accept(json.loads(grammar_spec))
        return _Grammar(parse)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Masks to be filled."""
        return self._constraint.blank(max_num_seqs)

    def destroy(self) -> None:
        """Nothing is kept."""


class _Grammar(StructuredOutputGrammar):
    """A parse, as vLLM calls it. Drafts, for which it would look ahead and go back, are refused at start."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take sampled tokens, which its mask allowed."""
        self._parse.accept(tokens)
        return True

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Write which tokens may follow."""
        self._parse.allowed(bitmask, batch_index)

    def is_terminated(self) -> bool:
        """Whether a token has ended it."""
        return self._parse.is_over

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """No draft is known to be good."""
        return []

    def rollback(self, num_tokens: int) -> None:
        """Nothing is looked ahead of."""
        assert not num_tokens

    def reset(self) -> None:
        """Nothing is used again."""
