"""`SglangEngine`: SGLang behind `Engine`, in this rank's process, as `NativeEngine`.

Requests are admitted in order of `add`.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import (
    AbortReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor, nn

from spmd_rl.base.errors import RunFailed
from spmd_rl.engine.base import Capacity
from spmd_rl.engine.fused_weights import CheckedWeights, plain_weights
from spmd_rl.engine.hosted import HostedEngine
from spmd_rl.engine.sequence import SequenceState, TextOf, has_stop, no_text
from spmd_rl.engine.sglang.adapter_slot import SglangAdapter
from spmd_rl.engine.sglang.start import HostedScheduler, stop
from spmd_rl.types import Completion, FinishReason, Request

FUSIONS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# The scheduler drops the last requests after one or two idle turns.
IDLE_TURNS = 4


class SglangEngine(HostedEngine):
    """An `Engine` over a scheduler from `start`."""

    def __init__(
        self,
        scheduler: HostedScheduler,
        shapes: Mapping[str, torch.Size],
        replica: dist.ProcessGroup,
        sleeps: bool = False,
        text_of: TextOf = no_text,
        slot: SglangAdapter | None = None,
    ) -> None:
        """replica: group of its ranks. text_of: for stop strings. See `HostedEngine`."""
        self.scheduler = scheduler
        self._replica = replica
        self._sampler = scheduler.tp_worker.model_runner.sampler
        # SGLang's names differ from ours: an id may be used again while SGLang still drops the old request.
        self._rids: dict[str, str] = {}
        # SGLang would truncate longer requests.
        max_tokens = scheduler.max_req_len - 1
        capacity = Capacity(scheduler.max_running_requests, scheduler.max_total_num_tokens, max_tokens)
        super().__init__(capacity, shapes, sleeps, text_of, slot)

    def add(self, request: Request) -> None:
        """Queue a request, see `Engine.add`; ValueError for a negative temperature."""
        if request.temperature < 0:
            raise ValueError(f"request {request.id}: negative temperature {request.temperature}")
        row, recorder = self.begin(request), self._sampler.experts
        row.num_experts = recorder.per_token if recorder else 0
        # Names of equal length, because SGLang aborts by prefix.
        rid = self._rids[request.id] = f"{self.num_added:012d}"
        self._sampler.rows[rid] = row
        sampling = SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=True)
        sampling.normalize(None)
        self.scheduler.inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", request.prompt_ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                extra_key=self._cache_key(request.cache),
                lora_id=self.slot.ref.lora_id if self.slot else None,
            )
        )

    def _cache_key(self, cache: str) -> str:
        return f"version {self.version} {cache}"

    def abort(self, ids: Iterable[str]) -> None:
        """End requests, see `Engine.abort`."""
        rows = [self._end(id) for id in dict.fromkeys(ids) if id in self.under_way]
        self._aborted += [row.completion("abort") for row in rows]

    def _end(self, id: str, ended: bool = False) -> SequenceState:
        rid = self._rids.pop(id)
        del self._sampler.rows[rid]
        if not ended:
            self.scheduler.inbox.append(AbortReq(rid=rid))
        return self.under_way.pop(id)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one turn: new requests' prompts with one token each, or one token for each running request."""
        ended, self._aborted = self._aborted, []
        if not self.under_way:
            return ended
        batch = self.scheduler.turn()
        for req in batch.reqs if batch else []:
            row = self._sampler.rows.get(req.rid)
            if row is None:
                continue
            # False while SGLang computes part of a long prompt.
            new = len(req.output_ids) > len(row.token_ids)
            if new and (reason := self._extend(row, req)):
                self._end(row.request.id, ended=req.finished())
                ended.append(row.completion(reason))
            elif req.finished():
                raise RunFailed(f"SGLang ended request {row.request.id}: {req.finished_reason.to_json()}")
        return ended

    def _extend(self, row: SequenceState, req: Req) -> FinishReason | None:
        drawn = self._sampler.drawn[req.rid]
        # Without a sampled token the last fed token was the prompt's.
        if row.token_ids:
            row.experts.extend(drawn.experts)
        else:
            self.count_prompt(row.request, req.cached_tokens)
        assert req.output_ids[len(row.token_ids) :].tolist() == [drawn.token], f"{row.request.id} got other tokens"
        row.append(drawn.token, drawn.logprob, self.version, drawn.candidate_ids)
        if drawn.token in row.request.stop_ids or has_stop(row, self.text_of):
            return "stop"
        return "length" if len(row.token_ids) == row.request.max_new_tokens else None

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights, see `Engine.load`; requests in progress continue."""
        self.version = None
        faults = self.take(weights)
        if self.under_way:
            self._renew_cache_keys(version)
        else:
            self._flush(version)
        self.end_load(version, faults)

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        checked = CheckedWeights(weights, self.shapes)
        # A model may load in threads; the trainer's own tensor is good only until the next.
        self.model.load_weights((name, tensor.clone()) for name, tensor in checked)
        return checked.end()

    def _flush(self, version: int) -> None:
        # SGLang refuses while a request is in progress, and after the last answer until a turn was idle.
        for _ in range(IDLE_TURNS):
            self.scheduler.turn()
        if not self.scheduler.flush_cache(empty_cache=False):
            raise RunFailed(f"SGLang kept keys and values older than version {version}")

    def _renew_cache_keys(self, version: int) -> None:
        """Bar new requests from keys and values of older weights; those in progress keep theirs."""
        self.version = version
        for request in [*self.scheduler.inbox, *self.scheduler.waiting_queue]:
            row = self._sampler.rows.get(request.rid)
            if row is not None and not row.token_ids:
                request.extra_key = self._cache_key(row.request.cache)

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield SGLang's tensors where plain and whole, at tp=1; with adapters, the last load's."""
        if dist.get_world_size(self._replica) > 1:
            return ((name, None) for name in self.shapes)
        dtype = next(self.model.parameters()).dtype
        return self.taken(plain_weights(self.model, self.shapes, dtype, FUSIONS))

    def _restore(self, tag: str) -> None:
        self.scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]))

    def _release(self, tag: str) -> None:
        # SGLang flushes only after some idle turns.
        for _ in range(IDLE_TURNS):
            self.scheduler.turn()
        self.scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[tag]))

    @property
    def model(self) -> nn.Module:
        """SGLang's module in this process."""
        return self.scheduler.tp_worker.model_runner.model

    def _stop(self) -> None:
        if self.scheduler is not None:
            stop(self._replica)
        self.scheduler = None
