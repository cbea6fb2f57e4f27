"""`NativeEngine`: one step computes the prompts that are new, then one token for every running request.

    engine = NativeEngine(empty_module(path, torch.bfloat16), max_running=64, kv_tokens=32768)
    engine.load(model.state_dict().items(), version=0)
    engine.add(Request("a", prompt_ids, max_new_tokens=12, temperature=1.0, seed=7))
    while engine.num_unfinished:
        for completion in engine.step(): ...

The same adds and steps give bitwise the same tokens and logprobs. Left out: what is asked for and why (`rollout/`).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.engine.answer import TextOf, check, no_text, says_stop
from spmd_rl.engine.base import Capacity
from spmd_rl.engine.native.attention import Decode, LengthBucket, Prefill
from spmd_rl.engine.native.kv import BLOCK, KVPool
from spmd_rl.engine.native.sampling import sample, sample_truncated, uniform
from spmd_rl.engine.native.scheduler import Prefix, Row, Scheduler
from spmd_rl.errors import RunFailed, UserError
from spmd_rl.model.build import weights_of
from spmd_rl.model.size import head_dim, num_kv_heads
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Completion, FinishReason, Request

PREFILL_TOKENS = 4096
"""Prompt tokens of one forward (a longer prompt goes alone): the bound of its activations."""
ROUND_PREFILL, ROUND_DECODE = 64, 8
"""Forwards are filled up to multiples of these: kernels are compiled and kept per shape, and would pile up."""


class NativeEngine:
    """An `Engine` over a Hugging Face module (see `module.py`) on one device."""

    leads = True

    def __init__(
        self,
        module: nn.Module,
        max_running: int,
        kv_tokens: int,
        offload: bool = False,
        text_of: TextOf = no_text,
    ) -> None:
        """`offload`: weights go to host memory and the KV cache is freed outside `awake()`. No effect on CPU.

        `text_of`: needed for requests with stop strings.
        """
        self._module, self._text_of = module, text_of
        self._parts = stored_parts(module)
        self._weights = weights_of(module, self._parts)
        config, weight = module.config, next(module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self.pool = KVPool(
            config.num_hidden_layers, kv_tokens, num_kv_heads(config), head_dim(config), self._dtype, self._device
        )
        # A prompt's partial last block is held twice while its request runs.
        max_tokens = min((self.pool.num_blocks - 1) * BLOCK, config.max_position_embeddings)
        if max_running < 1 or max_tokens < 1:
            raise UserError(
                f"engine.max_running={max_running}, engine.kv_tokens={kv_tokens}: too small for one request"
            )
        self.capacity = Capacity(max_running, kv_tokens, max_tokens)
        self._scheduler = Scheduler(self.pool, max_running)
        self._aborted: list[Completion] = []
        self._version: int | None = None
        self._offload = offload and self._device.type != "cpu"
        self._num_awake = 0
        if self._offload:
            self._sleep()

    @property
    def num_unfinished(self) -> int:
        """Requests whose completion has not been handed out."""
        return len(self._scheduler.unfinished) + len(self._aborted)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it is empty or longer than `capacity.max_tokens`."""
        assert self._version is not None, "no weights loaded in this process"
        check(request, self.capacity.max_tokens)
        if request.temperature < 0:
            raise ValueError(f"request {request.id}: negative temperature {request.temperature}")
        self._scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns what they have. Ids that have ended are passed over."""
        self._aborted += self._scheduler.abort(set(ids))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, compute one token for each running request, return those that ended."""
        ended, self._aborted = self._aborted, []
        prefixes, fresh = self._scheduler.admit()
        self._prefill([prefix for prefix in prefixes if prefix.token_ids])
        self._fork(fresh)
        if self._scheduler.rows:
            ended += self._decode()
        return ended

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy all weights, cast to the engine's dtype. RunFailed names what is missing, unknown, doubled or misshapen.

        `weights` is read to its end in any case: other ranks may be gathering it with us.
        """
        assert self.num_unfinished == 0, "load() with requests under way"
        assert self.pool.num_used == 0, "a cached key would outlive its weights"
        self._version = None
        missing, faults = dict(self._weights), []
        for name, tensor in weights:
            held = missing.pop(name, None)
            if held is None:
                faults.append(f"{name} came twice" if name in self._weights else f"{name} is unknown to the engine")
            elif held.shape != tensor.shape:
                faults.append(f"{name} has shape {tuple(tensor.shape)}, the engine's {tuple(held.shape)}")
            else:
                held.copy_(tensor)
        faults += [f"{name} is missing" for name in missing]
        if faults:
            raise RunFailed(f"engine weights of version {version}: {faults[0]} ({len(faults)} faults)")
        self._version = version

    def loaded_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they are, under their Hugging Face names."""
        yield from self._weights.items()

    def driven(self) -> AbstractContextManager[None]:
        """A replica of one rank decides for itself."""
        return nullcontext()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Weights and KV cache on the device; nests. With `offload`, the outermost exit takes them off."""
        if self._offload and self._num_awake == 0:
            self._move(self._device)
            self.pool.wake()
        self._num_awake += 1
        try:
            yield
        finally:
            self._num_awake -= 1
        if self._offload and self._num_awake == 0:  # not with an exception pending: the process is about to end
            self._sleep()

    def close(self) -> None:
        """Free weights and cache; idempotent."""
        self._scheduler.abort(self._scheduler.unfinished)
        self._aborted.clear()
        self._version = None
        self._weights.clear()
        self._module = nn.Module()
        self.pool.sleep()

    def _sleep(self) -> None:
        self._move(torch.device("cpu"))
        self.pool.sleep()

    def _move(self, device: torch.device) -> None:
        for weight in self._module.state_dict(keep_vars=True).values():
            weight.data = weight.data.to(device)
        self._weights = weights_of(self._module, self._parts)

    def _prefill(self, prefixes: list[Prefix]) -> None:
        """Compute and store keys and values of whole prefixes; no logits."""
        while prefixes:
            batch, room = [], PREFILL_TOKENS
            while prefixes and (not batch or len(prefixes[0].token_ids) <= room):
                batch.append(prefixes.pop(0))
                room -= len(batch[-1].token_ids)
            ids, positions, slots, spans = [], [], [], []
            for prefix in batch:
                length = len(prefix.token_ids)
                spans.append((len(ids), len(ids) + length))
                ids += prefix.token_ids
                positions += range(length)
                slots += [prefix.blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)]
            kv = Prefill(self.pool, self._tensor(slots), tuple(spans))
            self._module.base_model(**self._inputs(ids, positions, ROUND_PREFILL), kv=kv)

    def _fork(self, rows: list[Row]) -> None:
        """Give each new row its own copy of its prefix's partial last block."""
        partial = [row for row in rows if len(row.prefix.token_ids) % BLOCK]
        if partial:
            index = [len(row.prefix.token_ids) // BLOCK for row in partial]
            targets = [row.table[i] for row, i in zip(partial, index, strict=True)]
            self.pool.copy([row.prefix.blocks[-1] for row in partial], targets)

    def _decode(self) -> list[Completion]:
        """One token for every row; returns the completions of those that end with it."""
        rows = sorted(self._scheduler.rows, key=_bucket)
        positions = [row.position for row in rows]
        slots = [row.slot(position) for row, position in zip(rows, positions, strict=True)]
        kv = Decode(self.pool, self._tensor(slots), self._buckets(rows))
        inputs = self._inputs([row.last_token for row in rows], positions, ROUND_DECODE)
        logits = self._module(**inputs, kv=kv).logits[0, : len(rows)]
        self._sample(rows, logits)
        ended = []
        for row in rows:
            if reason := self._finish_reason(row):
                self._scheduler.end(row)
                ended.append(row.completion(reason))
        return ended

    def _sample(self, rows: list[Row], logits: Tensor) -> None:
        """Append a token to each row, from `logits` [R, V]."""
        requests = [row.request for row in rows]
        temperatures = torch.tensor([request.temperature for request in requests], device=self._device)
        draws = [uniform(row.request.seed, len(row.token_ids)) for row in rows]
        uniforms = torch.tensor(draws, dtype=torch.float64, device=self._device)
        cut = [i for i, request in enumerate(requests) if request.truncated]
        if len(cut) < len(rows):
            tokens, logprobs = sample(logits, temperatures, uniforms)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if not row.request.truncated:
                    row.append(token, logprob, self._version)
        if cut:
            top_k = self._tensor([requests[i].top_k for i in cut])
            shares = [(requests[i].top_p, requests[i].min_p) for i in cut]
            top_p, min_p = torch.tensor(shares, dtype=torch.float64, device=self._device).unbind(-1)
            drawn = sample_truncated(logits[cut], temperatures[cut], uniforms[cut], top_k, top_p, min_p)
            for i, token, logprob, survivors in zip(cut, drawn[0].tolist(), drawn[1].tolist(), drawn[2], strict=True):
                rows[i].append(token, logprob, self._version, survivors)

    def _finish_reason(self, row: Row) -> FinishReason | None:
        """The reason to stop after the last token, if there is one."""
        if row.token_ids[-1] in row.request.stop_ids or says_stop(row, self._text_of):
            return "stop"
        return "length" if len(row.token_ids) == row.request.max_new_tokens else None

    def _buckets(self, rows: list[Row]) -> tuple[LengthBucket, ...]:
        """Rows (sorted by `_bucket`) in runs of about equal length, so that one long row does not pad them all."""
        buckets, begin = [], 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and _bucket(rows[end]) == _bucket(rows[begin]):
                continue
            part = rows[begin:end]
            width = max(row.position for row in part) // BLOCK + 1
            tables = self._tensor([(row.table + row.table[:1] * width)[:width] for row in part])
            positions = self._tensor([row.position for row in part])[:, None]
            later = torch.arange(width * BLOCK, device=self._device) > positions
            mask = torch.zeros(later.shape, dtype=self._dtype, device=self._device).masked_fill_(later, -math.inf)
            buckets.append(LengthBucket(slice(begin, end), tables, mask[:, None, None]))
            begin = end
        return tuple(buckets)

    def _inputs(self, ids: list[int], positions: list[int], multiple: int) -> dict[str, Any]:
        """Arguments of a forward, filled up to a multiple of `multiple` tokens."""
        blank = [0] * (-len(ids) % multiple)
        return {
            "input_ids": self._tensor([ids + blank]),
            "position_ids": self._tensor([positions + blank]),
            "use_cache": False,
        }

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _bucket(row: Row) -> int:
    """Rows of one bucket differ in length by a factor of two at most (short ones, up to 128 tokens, stand together)."""
    return max(row.position // 128, 0).bit_length()
