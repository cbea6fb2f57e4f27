"""Admission: requests wait by priority, then (ticket, answer, turn), until a row and all their blocks are free.

A request takes blocks for prompt and token limit at once, so nothing is preempted. Requests never overtake, so none
starves. A prompt's blocks are cached from admission, so that a group's answers compute it once; an answer's when it
ends, for the agent's next turn.
"""

import heapq
from array import array
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.engine.base import EngineCounts
from spmd_rl.engine.native.kv import BLOCK, KVPool, block_keys, blocks_for
from spmd_rl.engine.sequence import SequenceState
from spmd_rl.model.hybrid import RowState
from spmd_rl.types import Completion, Request


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence(SequenceState):
    """An admitted request with its blocks."""

    table: list[int]
    """blocks for all tokens it may store"""
    num_stored: int
    states: dict[int, RowState] = field(default_factory=dict)
    """state of each layer with one, by number in the model"""
    shared: bool = True
    """False once weights changed: later requests may not use its blocks"""
    positions: Any = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def num_fed(self) -> int:
        """Number of tokens not yet fed to the model."""
        return self.num_tokens - self.num_stored

    @property
    def fed(self) -> array:
        """Ids ('i') of tokens to feed next."""
        begin = self.num_stored - len(self.request.prompt_ids)
        return self.token_ids[begin:] if begin >= 0 else self.request.prompt_ids[begin:] + self.token_ids

    def slot(self, position: int) -> int:
        """Return the cache slot of the token at `position`."""
        return self.table[position // BLOCK] * BLOCK + position % BLOCK


class Scheduler:
    """Waiting and running requests, and their blocks."""

    def __init__(self, pool: KVPool, max_running: int, num_experts: int = 0, shares_prefixes: bool = True) -> None:
        """num_experts: recorded per token. shares_prefixes: False: prompts use no cached blocks."""
        self.rows: list[RunningSequence] = []
        """running requests, in order of admission"""
        self.unfinished: set[str] = set()
        self.token_counts = EngineCounts()
        self._pool, self._max_running, self._num_experts = pool, max_running, num_experts
        self._shares_prefixes = shares_prefixes
        self._waiting: list[tuple[tuple[float, tuple[int, ...]], int, Request]] = []  # a heap
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Queue a request; equal `queue_key`s are admitted in order of `add`."""
        assert request.id not in self.unfinished, f"request {request.id} is under way already"
        self.unfinished.add(request.id)
        heapq.heappush(self._waiting, (request.queue_key, self._num_added, request))
        self._num_added += 1

    def admit(self) -> None:
        """Admit requests that fit. A row may use blocks that an earlier row is about to compute."""
        while self._waiting and len(self.rows) < self._max_running:
            request = self._waiting[0][-1]
            num_tokens = len(request.prompt_ids)
            keys = block_keys(request.prompt_ids, request.cache) if self._shares_prefixes else []
            # Never all of the prompt: the last token must be computed for its logits.
            found = self._pool.find(keys[: (num_tokens - 1) // BLOCK])
            num_own = blocks_for(num_tokens + request.max_new_tokens - 1) - len(found)
            if num_own > self._pool.num_free:
                self._pool.drop(found)
                break
            heapq.heappop(self._waiting)
            table = found + self._pool.take(num_own)
            self._pool.keep(keys, table)
            row = RunningSequence(request, num_experts=self._num_experts, table=table, num_stored=len(found) * BLOCK)
            row.shared = self._shares_prefixes
            self.rows.append(row)
            self.token_counts.count(num_tokens, len(found) * BLOCK)

    def forget(self) -> None:
        """Drop cached keys and values for later requests; running rows keep theirs."""
        self._pool.forget()
        for row in self.rows:
            row.shared = False

    def end(self, row: RunningSequence) -> None:
        """Remove a row; its blocks stay cached if computed with present weights."""
        self.rows.remove(row)
        self.unfinished.remove(row.request.id)
        if row.shared:
            stored = (row.request.prompt_ids + row.token_ids)[: row.num_stored]
            self._pool.keep(block_keys(stored, row.request.cache), row.table)
        self._pool.drop(row.table)

    def abort(self, ids: Set[str]) -> list[Completion]:
        """End waiting or running requests; finished ids are ignored."""
        ids = frozenset(ids)
        ended = []
        for row in [row for row in self.rows if row.request.id in ids]:
            self.end(row)
            ended.append(row.completion("abort"))
        for _, _, request in sorted(item for item in self._waiting if item[-1].id in ids):
            self.unfinished.remove(request.id)
            ended.append(SequenceState(request).completion("abort"))
        self._waiting = [item for item in self._waiting if item[-1].id not in ids]
        heapq.heapify(self._waiting)
        return ended
