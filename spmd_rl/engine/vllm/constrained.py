"""Constrained answers on vLLM: its structured outputs, with our `Constraint` as compiler.

So one function decides everywhere which tokens may follow, and vLLM needs no tokenizer.
"""

import json
from typing import Any

from torch import Tensor
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from spmd_rl.model.constraint import Constraint
from spmd_rl.types import Request


def constrain(llm: LLMEngine, constraint: Constraint) -> None:
    """Constrain answers of a started vLLM, in requests with `grammar_of`."""
    # With this configuration vLLM would load a tokenizer.
    llm.input_processor.structured_outputs_config = None
    llm.engine_core.engine_core.structured_output_manager.backend = _Grammars(constraint)


def grammar_of(request: Request) -> StructuredOutputsParams:
    """Return a request's grammar argument: tokens that begin its answer."""
    return StructuredOutputsParams(grammar=json.dumps(request.begun.tolist()))


class _Grammars:
    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def compile_grammar(self, _: Any, grammar_spec: str, stop_token_ids: set[int] | None = None) -> XgrammarGrammar:
        """Return the grammar of an answer, see `grammar_of`."""
        grammar, matcher = self._constraint.grammar, self._constraint.begin(json.loads(grammar_spec))
        return XgrammarGrammar(grammar.tokenizer_info.vocab_size, matcher, grammar)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        """Return uninitialised masks of requests' tokens."""
        return self._constraint.blank(max_num_seqs)

    def destroy(self) -> None:
        """Do nothing, as nothing is allocated."""
