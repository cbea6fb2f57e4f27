"""Who runs: requests wait in (ticket, answer, turn) order and are admitted when a row and all their blocks are free.

A request's blocks are taken at once for its prompt and its token limit: nothing is ever preempted, and the pool is the
bound. Whoever waits first is admitted first, even if a later one would fit: no request starves.

Requests with the same prompt share it while any of them runs. A `Prefix` is the prompt without its last token, stored
once. Every request enters as one row that feeds the last prompt token and has the prefix in its table: full blocks
shared, the partial last one copied, because the request will write into it.
"""

import heapq
from array import array
from collections.abc import Set
from dataclasses import dataclass

from spmd_rl.engine.answer import Answer
from spmd_rl.engine.native.kv import BLOCK, KVPool, blocks_for
from spmd_rl.types import Completion, Request


@dataclass(eq=False, slots=True)
class Prefix:
    """A prompt without its last token, stored once for all who start with it."""

    token_ids: array  # 'i'
    blocks: list[int]
    num_users: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Row(Answer):
    """A request that runs."""

    prefix: Prefix
    table: list[int]
    """blocks of all tokens it may come to store"""

    @property
    def last_token(self) -> int:
        """The token to feed next: known, not stored yet."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def position(self) -> int:
        """Of `last_token`."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def slot(self, position: int) -> int:
        """Where the token at `position` is stored."""
        return self.table[position // BLOCK] * BLOCK + position % BLOCK


class Scheduler:
    """Requests waiting and running, and the blocks they hold."""

    def __init__(self, pool: KVPool, max_running: int) -> None:
        self.rows: list[Row] = []
        """running, in the order of their admission"""
        self.unfinished: set[str] = set()
        """ids of those waiting and running"""
        self._pool, self._max_running = pool, max_running
        self._waiting: list[tuple[tuple[int, ...], int, Request]] = []  # a heap
        self._num_added = 0
        self._prefixes: dict[bytes, Prefix] = {}

    def add(self, request: Request) -> None:
        """Queue a request; equal orders are admitted in the order of `add`."""
        assert request.id not in self.unfinished, f"request {request.id} is under way already"
        self.unfinished.add(request.id)
        heapq.heappush(self._waiting, (request.order, self._num_added, request))
        self._num_added += 1

    def admit(self) -> tuple[list[Prefix], list[Row]]:
        """Admit what fits; returns the prefixes to be computed and the rows that are new."""
        prefixes, rows = [], []
        while self._waiting and len(self.rows) < self._max_running:
            request = self._waiting[0][-1]
            stem = request.prompt_ids[:-1]
            prefix = self._prefixes.get(stem.tobytes())
            num_shared = len(stem) // BLOCK
            num_own = blocks_for(len(stem) + request.max_new_tokens) - num_shared
            if num_own + (blocks_for(len(stem)) if prefix is None else 0) > self._pool.num_free:
                break
            heapq.heappop(self._waiting)
            if prefix is None:
                prefix = Prefix(stem, self._pool.take(blocks_for(len(stem))))
                self._prefixes[stem.tobytes()] = prefix
                prefixes.append(prefix)
            prefix.num_users += 1
            table = self._pool.share(prefix.blocks[:num_shared]) + self._pool.take(num_own)
            rows.append(Row(request, prefix=prefix, table=table))
            self.rows.append(rows[-1])
        return prefixes, rows

    def end(self, row: Row) -> None:
        """Take a row out and give its blocks back."""
        self.rows.remove(row)
        self.unfinished.remove(row.request.id)
        self._pool.drop(row.table)
        row.prefix.num_users -= 1
        if row.prefix.num_users == 0:
            self._pool.drop(row.prefix.blocks)
            del self._prefixes[row.prefix.token_ids.tobytes()]

    def abort(self, ids: Set[str]) -> list[Completion]:
        """End these requests, waiting or running; ids that have ended already are passed over."""
        ids = frozenset(ids)
        ended = []
        for row in [row for row in self.rows if row.request.id in ids]:
            self.end(row)
            ended.append(row.completion("abort"))
        for _, _, request in sorted(item for item in self._waiting if item[-1].id in ids):
            self.unfinished.remove(request.id)
            ended.append(Answer(request).completion("abort"))
        self._waiting = [item for item in self._waiting if item[-1].id not in ids]
        heapq.heapify(self._waiting)
        return ended
