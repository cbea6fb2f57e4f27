"""`NativeEngine`: a step computes a token for every running request, and the prompts of new ones.

    engine = NativeEngine(empty_module(path, torch.bfloat16), max_running=64, kv_tokens=32768)
    engine.load(model.state_dict().items(), version=0)
    engine.add(Request("a", prompt_ids, max_new_tokens=12, temperature=1.0, seed=7))
    while engine.num_unfinished:
        for completion in engine.step(): ...

The same adds and steps give bitwise the same tokens and logprobs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.base import Capacity, Engine
from spmd_rl.engine.fused_weights import CheckedWeights
from spmd_rl.engine.native.attention import Bucket, Paged, causal_mask
from spmd_rl.engine.native.decode import DecodeSteps, can_be_captured
from spmd_rl.engine.native.kv import BLOCK, KVPool
from spmd_rl.engine.native.module import empty_module
from spmd_rl.engine.native.routing import ChosenExperts
from spmd_rl.engine.native.sampling import cut_off, draw
from spmd_rl.engine.native.scheduler import RunningSequence, Scheduler
from spmd_rl.engine.native.states import CarriedStates
from spmd_rl.engine.sequence import TextOf, check, has_stop, no_text, text_of_model
from spmd_rl.model.build import weights_of
from spmd_rl.model.constraint import Constraint, constraint_of
from spmd_rl.model.hybrid import stateful_layers
from spmd_rl.model.moe import num_experts
from spmd_rl.model.size import attention_layers, head_dim, num_kv_heads
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Completion, FinishReason, Request

if TYPE_CHECKING:
    from spmd_rl.engine.native.pictures import EnginePictures

# Bounds activations; a longer prompt goes alone.
BATCH_TOKENS = 4096
# Bounds the mask of a kernel call.
QUERIES = 256
# Kernels are compiled and cached per shape, and would pile up.
ROUND_FEW, ROUND_MANY = 8, 64
"""Multiples to which forwards are padded"""


class NativeEngine(Engine):
    """An `Engine` over a Hugging Face module on one device."""

    def __init__(
        self,
        module: nn.Module,
        max_running: int,
        kv_tokens: int,
        offload: bool = False,
        text_of: TextOf = no_text,
        records_experts: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        """offload: outside `awake()` weights go to host memory and the KV cache is freed; no effect on CPU.

        text_of: for stop strings. records_experts: completions have each token's experts; UserError for a dense model.
        constraint: grammar of all answers.
        """
        self._constraint = constraint
        self._text_of = text_of
        self.model = module
        self._parts = stored_parts(module)
        self._weights = weights_of(module, self._parts)
        config, weight = module.config.get_text_config(), next(module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._places = {layer: place for place, layer in enumerate(attention_layers(config))}
        self.pool = KVPool(
            len(self._places), kv_tokens, num_kv_heads(config), head_dim(config), self._dtype, self._device
        )
        self._heads_per_key = config.num_attention_heads // num_kv_heads(config)
        max_tokens = min(self.pool.num_blocks * BLOCK, config.max_position_embeddings)
        if max_running < 1 or max_tokens < 1:
            raise UserError(
                f"engine.max_running={max_running}, engine.kv_tokens={kv_tokens}: too small for one request"
            )
        self.capacity = Capacity(max_running, kv_tokens, max_tokens)
        self._experts = ChosenExperts(module) if records_experts else None
        # The states behind a cached prefix are not kept.
        self._is_hybrid = bool(stateful_layers(module))
        self._pictures = _build_pictures(module)
        self.processor = self._pictures and self._pictures.processor
        per_token = self._experts.per_token if self._experts else 0
        self._scheduler = Scheduler(self.pool, max_running, per_token, shares_prefixes=not self._is_hybrid)
        # Experts' sizes, states and pictures differ from step to step.
        is_alike = not (self._is_hybrid or self._pictures or num_experts(config)) and can_be_captured(module)
        self.graphs = DecodeSteps(module, self.pool, self._places) if is_alike and self._device.type == "cuda" else None
        """Decode steps as CUDA graphs, if any"""
        self.token_counts = self._scheduler.token_counts
        self._aborted: list[Completion] = []
        self._version: int | None = None
        self.offloads = offload and self._device.type != "cpu"
        """True if weights leave the device outside `awake()`"""
        self._num_awake = 0
        if self.offloads:
            self._sleep()

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose completion was not returned."""
        return len(self._scheduler.unfinished) + len(self._aborted)

    def add(self, request: Request) -> None:
        """Queue a request, see `Engine.add`."""
        assert self._version is not None, "no weights loaded in this process"
        check(request, self.capacity.max_tokens, self.processor)
        if request.temperature < 0:
            raise ValueError(f"request {request.id}: negative temperature {request.temperature}")
        self._scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """End requests, see `Engine.abort`."""
        self._aborted += self._scheduler.abort(set(ids))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Compute a token per request, see `Engine.step`."""
        ended, self._aborted = self._aborted, []
        self._scheduler.admit()
        rows, decoding = self._scheduler.rows, [row for row in self._scheduler.rows if row.num_fed == 1]
        if has_graph := self.graphs is not None and self.graphs.takes(decoding):
            rows = [row for row in rows if row.num_fed > 1]
        # Prompts first: a prompt's last token may read blocks of another's that are computed in this step.
        for batch in self._batches(rows):
            ended += self._forward(batch)
        if has_graph:
            ended += self._sampled(decoding, self.graphs.logits(decoding))
        return ended

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy all weights, cast to the engine's dtype, see `Engine.load`."""
        # Cached keys and features belong to the old weights.
        self._scheduler.forget()
        if self._pictures:
            self._pictures.forget()
        self._version = None
        checked = CheckedWeights(weights, {name: weight.shape for name, weight in self._weights.items()})
        for name, tensor in checked:
            self._weights[name].copy_(tensor)
        if faults := checked.end():
            raise RunFailed(f"engine weights of version {version}: {faults[0]} ({len(faults)} faults)")
        self._version = version

    def loaded_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names."""
        yield from self._weights.items()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep weights and KV cache on the device inside."""
        if self.offloads and self._num_awake == 0:
            self._move(self._device)
            self.pool.wake()
        self._num_awake += 1
        try:
            yield
        finally:
            self._num_awake -= 1
        # Not with an exception pending: the process is about to end.
        if self.offloads and self._num_awake == 0:
            self._sleep()

    def close(self) -> None:
        """Free weights and KV cache; idempotent."""
        self._scheduler.abort(self._scheduler.unfinished)
        self._aborted.clear()
        self._version = None
        self._weights.clear()
        self.graphs, self.model = None, nn.Module()
        self.pool.sleep()

    def _sleep(self) -> None:
        if self.graphs:
            self.graphs.forget()
        self._move(torch.device("cpu"))
        self.pool.sleep()
        if self._pictures:
            self._pictures.forget()

    def _move(self, device: torch.device) -> None:
        for weight in self.model.state_dict(keep_vars=True).values():
            weight.data = weight.data.to(device)
        self._weights = weights_of(self.model, self._parts)

    def _batches(self, rows: Iterable[RunningSequence]) -> list[list[RunningSequence]]:
        batches, room = [], 0
        for row in rows:
            if not batches or row.num_fed > room:
                batches.append([])
                room = BATCH_TOKENS
            batches[-1].append(row)
            room -= row.num_fed
        return batches

    def _forward(self, rows: list[RunningSequence]) -> list[Completion]:
        rows = sorted(rows, key=_shape)
        ids, positions, slots, last = [], [], [], []
        for row in rows:
            new = range(row.num_stored, row.num_stored + row.num_fed)
            ids += row.fed
            positions += new
            slots += map(row.slot, new)
            last.append(len(ids) - 1)
        kv = Paged(self.pool, self._tensor(slots), tuple(self._buckets(rows)), self._places)
        blank = [0] * (_filled(len(ids)) - len(ids))
        output = self.model(
            **self._inputs(rows, self._tensor([ids + blank]), self._tensor([positions + blank])),
            use_cache=False,
            logits_to_keep=self._tensor(last + [0] * (-len(last) % ROUND_FEW)),
            kv=kv,
            **({"seq_idx": CarriedStates(rows, self._device.type != "cpu")} if self._is_hybrid else {}),
        )
        if self._experts:
            for row, chosen in zip(rows, self._experts.at(self._tensor(last)), strict=True):
                # Without a sampled token the last fed token was the prompt's.
                if row.token_ids:
                    row.experts.extend(chosen)
        return self._sampled(rows, output.logits[0, : len(rows)])

    def _sampled(self, rows: list[RunningSequence], logits: Tensor) -> list[Completion]:
        """Append a token to each row, from logits [R, V]; return ended rows' completions."""
        if self._constraint:
            cut_off(logits, rows, self._constraint)
        ended = []
        for row, token, logprob, candidates in zip(rows, *draw(logits, rows), strict=True):
            row.num_stored = row.num_tokens
            row.append(token, logprob, self._version, candidates)
            if reason := self._finish_reason(row):
                self._scheduler.end(row)
                ended.append(row.completion(reason))
        return ended

    def _inputs(self, rows: list[RunningSequence], ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the module's inputs for pending tokens, int64 [1, T], and their pictures."""
        if self._pictures:
            if (found := self._pictures.positions(rows, ids.shape[1])) is not None:
                positions = found
            given = self._pictures.given(rows)
            return {"input_ids": self._pictures.model_ids(ids), "position_ids": positions, **given}
        return {"input_ids": ids, "position_ids": positions}

    def _finish_reason(self, row: RunningSequence) -> FinishReason | None:
        if row.token_ids[-1] in row.request.stop_ids or has_stop(row, self._text_of):
            return "stop"
        return "length" if len(row.token_ids) == row.request.max_new_tokens else None

    def _buckets(self, rows: list[RunningSequence]) -> Iterator[Bucket]:
        # One long row would otherwise pad all others. Pieces of `QUERIES` tokens keep masks small.
        begin = 0
        for (num_tokens, _), run in groupby(rows, key=_shape):
            alike, num_together = list(run), max(1, QUERIES // num_tokens)
            for i in range(0, len(alike), num_together):
                part = alike[i : i + num_together]
                for first in range(0, num_tokens, QUERIES):
                    num = min(QUERIES, num_tokens - first)
                    yield self._bucket(part, [row.num_stored + first for row in part], num, begin + first)
                begin += num_tokens * len(part)

    def _bucket(self, rows: Sequence[RunningSequence], positions: list[int], num: int, begin: int) -> Bucket:
        """Return the bucket of `num` tokens per row from these positions; the first is token `begin` of the forward."""
        width = _width(max(positions) + num)
        tables = [(row.table + row.table[:1] * width)[: width // BLOCK] for row in rows]
        each = self._tensor(positions)[:, None, None] + torch.arange(num, device=self._device)[:, None]
        mask = causal_mask(each, width, self._dtype)
        if num > 1:
            mask = mask.repeat_interleave(self._heads_per_key, dim=1)
        return Bucket(slice(begin, begin + num * len(rows)), self._tensor(tables), mask[:, None])

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _build_pictures(module: nn.Module) -> "EnginePictures | None":
    if not hasattr(module, "tower"):
        return None
    # An engine of text alone imports neither it nor Pillow.
    from spmd_rl.engine.native.pictures import EnginePictures

    return EnginePictures(module.tower, next(module.parameters()).device)


def _shape(row: RunningSequence) -> tuple[int, int]:
    """Return a row's bucket key: number of fed tokens, and length within a factor of two (or at most 128)."""
    return row.num_fed, (row.num_tokens - 1 >> 7).bit_length()


def _filled(num_tokens: int) -> int:
    step = ROUND_FEW if num_tokens <= ROUND_MANY else ROUND_MANY
    return -(-num_tokens // step) * step


def _width(num_tokens: int) -> int:
    # Another padding would group the sums over keys differently, and change their bits.
    step = 16 if num_tokens <= 256 else 256
    return -(-num_tokens // step) * step


def build(
    settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: World, constraint: ConstraintConfig
) -> NativeEngine:
    """Return an engine of the policy's architecture and dtype on this rank's device."""
    trust = policy.trust_remote_code
    module = empty_module(policy.model, getattr(torch, policy.dtype), world.device, trust=trust)
    text_of = text_of_model(policy.model, trust)
    sizes, found = (settings.max_running, settings.kv_tokens), constraint_of(constraint, policy.model, trust)
    return NativeEngine(module, *sizes, sleeps, text_of, policy.router_replay, found)
