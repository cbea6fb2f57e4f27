"""`VllmEngine`: vLLM behind `Engine`, in this rank's process, as `NativeEngine`.

Requests are admitted in order of `add`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from spmd_rl.base.errors import RunFailed
from spmd_rl.data import counter_seed
from spmd_rl.engine.base import Capacity
from spmd_rl.engine.fused_weights import CheckedWeights, plain_weights
from spmd_rl.engine.hosted import HostedEngine
from spmd_rl.engine.sequence import SequenceState, TextOf, has_stop, no_text
from spmd_rl.engine.vllm.adapter_slot import AdapterSlot
from spmd_rl.engine.vllm.constrained import grammar_of
from spmd_rl.engine.vllm.drafts import count_drafts
from spmd_rl.engine.vllm.low_precision import Outputs
from spmd_rl.engine.vllm.start import TIES, model_of, stop
from spmd_rl.types import Completion, FinishReason, Request

if TYPE_CHECKING:
    from spmd_rl.engine.vllm.pictures import VllmPictures

# vLLM silently raises lower ones to the first number, and so reports logprobs of another temperature.
TEMPERATURES = (0.01, 2.0)
"""Range of sampling temperatures besides 0"""


class VllmEngine(HostedEngine):
    """An `Engine` over a vLLM from `start`."""

    def __init__(
        self,
        llm: LLMEngine,
        shapes: Mapping[str, torch.Size],
        sleeps: bool = False,
        text_of: TextOf = no_text,
        slot: AdapterSlot | None = None,
        is_constrained: bool = False,
        outputs: Outputs | None = None,
        pictures: "VllmPictures | None" = None,
    ) -> None:
        """text_of: for stop strings. is_constrained: by `constrained.constrain`. outputs: of 8-bit matrices, if
        used. pictures: of a model that takes them. See `HostedEngine`."""
        self._is_constrained, self._outputs, self._pictures = is_constrained, outputs, pictures
        self.llm = llm
        config = llm.vllm_config
        kv_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
        capacity = Capacity(config.scheduler_config.max_num_seqs, kv_tokens, config.model_config.max_model_len)
        self._num_ids = config.model_config.get_vocab_size()
        super().__init__(capacity, shapes, sleeps, text_of, slot)
        self.processor = pictures and pictures.processor
        self._drafts = config.speculative_config is not None
        count_drafts(llm, self.token_counts)

    def add(self, request: Request) -> None:
        """Queue a request, see `Engine.add`; ValueError for a temperature out of range."""
        low, high = TEMPERATURES
        if request.temperature != 0 and not low <= request.temperature <= high:
            raise ValueError(f"request {request.id}: temperature {request.temperature} is not 0 or {low} to {high}")
        if self._drafts and request.truncated:
            raise ValueError(f"request {request.id}: vLLM verifies no drafts among tokens that top_k has left")
        self.begin(request)
        salt = f"version {self.version} {request.cache}"
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": salt}
        if request.pictures:
            prompt = self._pictures.input(request, self.version, salt)
        adapter, arrival = self.slot.request if self.slot else None, float(self.num_added)
        sampling = self._sampling(request)
        self.llm.add_request(request.id, prompt, sampling, arrival_time=arrival, lora_request=adapter)

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            seed=_seed(request),
            max_tokens=request.max_new_tokens,
            # vLLM refuses requests with stop ids outside the vocabulary.
            stop_token_ids=[id for id in request.stop_ids if id < self._num_ids],
            ignore_eos=True,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            logprobs=self._num_logprobs(request),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=grammar_of(request) if self._is_constrained else None,
        )

    def _num_logprobs(self, request: Request) -> int:
        return min(self._num_ids, 2 * request.top_k + TIES) if request.truncated else 0

    def abort(self, ids: Iterable[str]) -> None:
        """End requests, see `Engine.abort`."""
        rows = [self.under_way.pop(id) for id in dict.fromkeys(ids) if id in self.under_way]
        self.llm.abort_request([row.request.id for row in rows])
        self._aborted += [row.completion("abort") for row in rows]

    def step(self) -> list[Completion]:
        """Compute a token per request, see `Engine.step`."""
        ended, self._aborted = self._aborted, []
        if not self.under_way:
            return ended
        for output in self.llm.step():
            row = self.under_way[output.request_id]
            if not row.token_ids:
                self.count_prompt(row.request, output.num_cached_tokens or 0)
            if reason := self._extend(row, output.outputs[0]):
                del self.under_way[row.request.id]
                ended.append(row.completion(reason))
        self._forget_logprobs()
        return ended

    def _extend(self, row: SequenceState, new: CompletionOutput) -> FinishReason | None:
        found, request = new.logprobs, row.request
        for token, begin, end in zip(new.token_ids, found.start_indices, found.end_indices, strict=True):
            candidates: list[int] = []
            if request.truncated:
                candidates = _candidate_ids(found.token_ids[begin:end], found.logprobs[begin:end])
                if len(candidates) >= self._num_logprobs(request) < self._num_ids:
                    raise RunFailed(
                        f"rollout.top_k={request.top_k}: vLLM drew among more than {len(candidates)} tokens, "
                        "as the logits of many are equal; which ones it does not report"
                    )
            # vLLM lists the sampled token first.
            row.append(token, found.logprobs[begin], self.version, candidates)
            if has_stop(row, self.text_of):
                if new.finish_reason is None:
                    self.llm.abort_request([request.id])
                return "stop"
        assert new.finish_reason in (None, "stop", "length"), f"{request.id} ended by {new.finish_reason}"
        return new.finish_reason

    def _forget_logprobs(self) -> None:
        for state in self.llm.output_processor.request_states.values():
            state.logprobs_processor.logprobs = FlatLogprobs()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights, see `Engine.load`."""
        assert self.num_unfinished == 0, "load() with requests under way"
        self._read_what_is_scheduled()
        self.version = None
        faults = self.take(weights)
        assert self.llm.reset_prefix_cache(), "a cached key would outlive its weights"
        if self._pictures:
            self.llm.reset_encoder_cache()
        self.end_load(version, faults)

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        checked = CheckedWeights(weights, self.shapes)
        unpack_experts(self.model)
        # vLLM keeps a tensor until its layer is whole; the trainer's own is good only until the next.
        noted = checked if self._outputs is None else self._outputs.noted(checked)
        kept = ((name, tensor.clone()) for name, tensor in noted)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": kept})
        repack_heads(self.model)
        faults = checked.end()
        return faults if self._outputs is None or faults else self._outputs.faults(self.model)

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield vLLM's tensors where plain and whole: at tp=1, on an accelerator all, on the CPU few; with adapters,
        the last load's."""
        config = self.llm.vllm_config
        if config.parallel_config.tensor_parallel_size > 1:
            return ((name, None) for name in self.shapes)
        fusions = getattr(self.model, "packed_modules_mapping", {})
        return self.taken(plain_weights(self.model, self.shapes, config.model_config.dtype, fusions))

    def _restore(self, tag: str) -> None:
        self.llm.wake_up([tag])

    def _read_what_is_scheduled(self) -> None:
        core = self.llm.engine_core.engine_core
        # A finished request counts as one until a step has reported it, and vLLM frees nothing before.
        while core.batch_queue or core.scheduler.has_finished_requests():
            self.llm.step()

    def _release(self, tag: str) -> None:
        self._read_what_is_scheduled()
        if tag == "weights":
            # Level 2 keeps buffers alone.
            self.llm.sleep(level=2 if self.slot is None else 1)
            return
        # vLLM asks for a pause, which ends when all of its memory is there again.
        self.llm.engine_core.engine_core.pause_scheduler()
        self.llm.release_kv_cache_memory()

    @property
    def model(self) -> nn.Module:
        """vLLM's module in this process."""
        return model_of(self.llm)

    def _stop(self) -> None:
        if self.llm is not None:
            stop(self.llm)
        self.llm = None


def _seed(request: Request) -> int:
    # Another seed for a continued answer, which would else repeat the first draws.
    seed = counter_seed(request.seed, request.num_begun) if request.num_begun else request.seed
    # vLLM takes -1 for no seed, and some of its runners store signed words.
    return seed % 2**63


def _candidate_ids(ids: Sequence[int], logprobs: Sequence[float]) -> list[int]:
    """Return the candidates, ascending; the first of `ids` may appear twice."""
    return sorted({id for id, logprob in zip(ids, logprobs, strict=True) if logprob != -math.inf})


def repack_heads(model: nn.Module) -> None:
    """Refresh output heads from their tied embedding."""
    # A reload skips a layer without a stored name, and on the CPU a head computes with a packed copy.
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def unpack_experts(model: nn.Module) -> None:
    """Make the next reload pack a mixture's experts again."""
    # vLLM does so only the first time; on the CPU it would mistake reloaded plain weights for packed ones. Elsewhere
    # weights are copied in place, where captured graphs expect them.
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and module.w13_weight.device.type == "cpu":
            method.moe_kernel = None
