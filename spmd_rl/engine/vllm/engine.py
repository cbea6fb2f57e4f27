"""`VllmEngine`: the real vLLM behind `Engine`, in this rank's process, request by request and step by step.

    engine = VllmEngine(start(path, ...), expected_shapes(path))
    engine.load(model.named_parameters(), version=0)
    engine.add(Request("a", prompt_ids, max_new_tokens=12, temperature=1.0, seed=7))
    while engine.num_unfinished:
        for completion in engine.step(): ...

Requests are admitted in the order of `add`. At tp > 1 all ranks of a replica make the same calls in the same order.
Left out: what is asked for and why (`rollout/`), how vLLM is started (`start.py`), tokenizers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from spmd_rl.data import counter_seed
from spmd_rl.engine.base import Capacity, Engine, PromptTokens
from spmd_rl.engine.checked_weights import CheckedWeights
from spmd_rl.engine.sequence import SequenceState, TextOf, check, has_stop, no_text
from spmd_rl.engine.vllm.adapter_slot import AdapterSlot
from spmd_rl.engine.vllm.start import TIES, stop
from spmd_rl.engine.vllm.weights import plain_weights, repack_heads, unpack_experts
from spmd_rl.errors import RunFailed
from spmd_rl.model.fingerprint import finish, start
from spmd_rl.types import Completion, FinishReason, Request

TEMPERATURES = (0.01, 2.0)
"""What vLLM draws at, beside 0. It would raise a lower one to this, and report logprobs of what nobody asked for."""


class VllmEngine(Engine):
    """An `Engine` over a vLLM that `start` has started."""

    def __init__(
        self,
        llm: LLMEngine,
        shapes: Mapping[str, torch.Size],
        sleeps: bool = False,
        text_of: TextOf = no_text,
        slot: AdapterSlot | None = None,
    ) -> None:
        """`shapes`: of the weights that `load` must bring, by Hugging Face name. `sleeps`: outside `awake`.

        `text_of`: needed for requests with stop strings. `slot`: where an adapter is computed with; then `load` may
        bring adapters alone, once it has brought all.
        """
        self._sleeps, self._text_of, self._slot = sleeps, text_of, slot
        self.llm = llm
        """vLLM itself, for a look inside where something is wrong."""
        self.shapes = shapes
        config = llm.vllm_config
        kv_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
        max_tokens = config.model_config.max_model_len
        self.capacity = Capacity(config.scheduler_config.max_num_seqs, kv_tokens, max_tokens)
        self._num_ids = config.model_config.get_vocab_size()
        self.under_way: dict[str, SequenceState] = {}
        """What each request has, by id."""
        self._aborted: list[Completion] = []
        self.version: int | None = None
        """The version of the weights; None before the first, and while there are none that are whole."""
        self.prompt_tokens = PromptTokens()
        self._num_added = 0
        self._first: str | None = None  # the first request since the load: none has computed anything it could reuse
        self._checksums: dict[str, bytes] = {}
        self.lost = ""
        """What is not as it was when the weights had been loaded: no request is taken until it is emptied."""
        self._num_awake = 0
        self._cache_sleeps = False
        if sleeps:
            self._sleep()

    @property
    def num_unfinished(self) -> int:
        """Requests whose completion has not been handed out."""
        return len(self.under_way) + len(self._aborted)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it is empty, longer than `capacity.max_tokens` or too hot or cold."""
        assert self.version is not None, "no weights loaded in this process"
        if self.lost:
            raise RunFailed(self.lost)
        assert request.id not in self.under_way, f"request {request.id} is under way already"
        check(request, self.capacity.max_tokens)
        low, high = TEMPERATURES
        if request.temperature != 0 and not low <= request.temperature <= high:
            raise ValueError(f"request {request.id}: temperature {request.temperature} is not 0 or {low} to {high}")
        prompt = {
            "type": "token",
            "prompt_token_ids": request.prompt_ids.tolist(),
            "cache_salt": f"version {self.version}",
        }
        if self._cache_sleeps:
            self._wake("kv_cache")
        self._num_added += 1
        if self._first is None:
            self._first = request.id
        adapter, arrival = self._slot.request if self._slot else None, float(self._num_added)
        sampling = self._sampling(request)
        self.llm.add_request(request.id, prompt, sampling, arrival_time=arrival, lora_request=adapter)
        self.under_way[request.id] = SequenceState(request)

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            seed=_seed(request),
            max_tokens=request.max_new_tokens,
            stop_token_ids=[id for id in request.stop_ids if id < self._num_ids],  # else vLLM refuses the request
            ignore_eos=True,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            logprobs=self._num_logprobs(request),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _num_logprobs(self, request: Request) -> int:
        """How many of the most likely tokens to ask for: enough to see all that are not cut off (see `TIES`)."""
        return min(self._num_ids, 2 * request.top_k + TIES) if request.truncated else 0

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns what they have. Ids that have ended are passed over."""
        rows = [self.under_way.pop(id) for id in dict.fromkeys(ids) if id in self.under_way]
        self.llm.abort_request([row.request.id for row in rows])
        self._aborted += [row.completion("abort") for row in rows]

    def step(self) -> list[Completion]:
        """Admit what fits, compute one token for each running request, return those that ended."""
        ended, self._aborted = self._aborted, []
        if not self.under_way:
            return ended
        for output in self.llm.step():
            row = self.under_way[output.request_id]
            if not row.token_ids:
                self.prompt_tokens.count(len(row.request.prompt_ids), output.num_cached_tokens or 0)
            if row.request.id == self._first:
                self._first = ""
                if output.num_cached_tokens:
                    raise RunFailed(f"the engine served keys and values older than version {self.version}")
            if reason := self._extend(row, output.outputs[0]):
                del self.under_way[row.request.id]
                ended.append(row.completion(reason))
        self._forget_logprobs()
        return ended

    def _extend(self, row: SequenceState, new: CompletionOutput) -> FinishReason | None:
        """Append new tokens; the reason to stop, if there is one."""
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
            row.append(token, found.logprobs[begin], self.version, candidates)  # the sampled one stands first
            if has_stop(row, self._text_of):
                if new.finish_reason is None:
                    self.llm.abort_request([request.id])
                return "stop"
        assert new.finish_reason in (None, "stop", "length"), f"{request.id} ended by {new.finish_reason}"
        return new.finish_reason

    def _forget_logprobs(self) -> None:
        """Free what vLLM would keep of them until an answer ends."""
        for state in self.llm.output_processor.request_states.values():
            state.logprobs_processor.logprobs = FlatLogprobs()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights. RunFailed names what is missing, unknown, doubled or misshapen.

        `weights` is read to its end in any case: other ranks may be gathering it with us.
        """
        assert self.num_unfinished == 0, "load() with requests under way"
        holds_base, self.version = self._checksums, None
        faults = [*filter(None, [self.lost])]
        if self._slot is None:
            faults += self._reload(weights)
        else:
            base = self._slot.others(weights)
            first = next(base, None)
            self._slot.brings_base = first is not None or not holds_base
            faults += self._reload(chain([first] if first else [], base)) if self._slot.brings_base else []
            faults += self._slot.put(self.llm)
        if faults:
            raise RunFailed(f"engine weights of version {version}: {faults[0]} ({len(faults)} faults)")
        assert self.llm.reset_prefix_cache(), "a cached key would outlive its weights"
        self.version, self._first = version, None
        self._checksums = self._fingerprints()

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Take over weights by their Hugging Face names; what is wrong with them."""
        checked = CheckedWeights(weights, self.shapes)
        unpack_experts(self.model)
        # vLLM keeps a tensor until its layer is whole; the trainer's own is good only until the next.
        kept = ((name, tensor.clone()) for name, tensor in checked)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": kept})
        repack_heads(self.model)
        return checked.end()

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """vLLM's own tensors where they are plain and whole: on an accelerator at tp=1 all, on the CPU few.

        With adapters, what the last load brought.
        """
        config = self.llm.vllm_config
        if config.parallel_config.tensor_parallel_size > 1:
            return ((name, None) for name in self.shapes)
        plain = plain_weights(self.model, self.shapes, config.model_config.dtype)
        if self._slot is None:
            return plain
        return chain(plain if self._slot.brings_base else (), self._slot.held(self.model))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Weights on the device; nests. Where it sleeps outside, the KV cache follows with the first request.

        If anything that stood when the weights had been loaded is not as it was, the next `add` or `load` is RunFailed.
        """
        if self._num_awake == 0:
            if self._sleeps:
                self._wake("weights")
            self.lost = self.lost or self._lost_tensor()
        self._num_awake += 1
        try:
            yield
        finally:
            self._num_awake -= 1
        if self._sleeps and self._num_awake == 0:  # not with an exception pending: the process is about to end
            self._sleep()

    def _wake(self, tag: str) -> None:
        """Give `weights` or `kv_cache` their memory on the device back."""
        torch.accelerator.empty_cache()  # vLLM allocates past torch, which may keep what the trainer has freed
        self.llm.wake_up([tag])
        self._cache_sleeps = self._cache_sleeps and tag != "kv_cache"

    def _sleep(self) -> None:
        """Weights to host memory, bit by bit; the KV cache is given up."""
        if self._cache_sleeps:  # vLLM counts as asleep until all is awake, and would not let the weights go
            self._wake("kv_cache")
        self.llm.sleep(level=1)
        self._cache_sleeps = True

    @property
    def model(self) -> nn.Module:
        """The module that vLLM computes with in this process."""
        return self.llm.model_executor.driver_worker.model_runner.get_model()

    def _fingerprints(self) -> dict[str, bytes]:
        """Hash what must survive until the next load: buffers (rotary tables, ...), and weights where they sleep."""
        tensors = dict(self.model.named_buffers()) | dict(self._slot.held(self.model) if self._slot else ())
        if self._sleeps:
            tensors |= dict(self.model.named_parameters())
        return finish({name: start(tensor) for name, tensor in tensors.items()})

    def _lost_tensor(self) -> str:
        """What is not as it was when the weights had been loaded, or nothing."""
        found = self._fingerprints() if self._checksums else {}
        lost = [name for name in self._checksums if found.get(name) != self._checksums[name]]
        return f"the engine lost {lost[0]} since its weights were loaded ({len(lost)} tensors)" if lost else ""

    def close(self) -> None:
        """Free everything; idempotent. The default process group stays."""
        if self.llm is not None:
            stop(self.llm)
        if self._slot is not None:
            self._slot.close()
        self.llm = None
        self.under_way.clear()
        self._aborted.clear()
        self.version = None


def _seed(request: Request) -> int:
    """The seed of one request: another one where an answer goes on, or it would begin with the same draws."""
    seed = counter_seed(request.seed, request.num_begun) if request.num_begun else request.seed
    return seed % 2**63  # vLLM reads -1 as none, and some of its runners keep signed words


def _candidate_ids(ids: Sequence[int], logprobs: Sequence[float]) -> list[int]:
    """The tokens that were not cut off, ascending; the first of `ids` may stand there twice."""
    return sorted({id for id, logprob in zip(ids, logprobs, strict=True) if logprob != -math.inf})
