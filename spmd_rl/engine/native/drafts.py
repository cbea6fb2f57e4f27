"""Drafts: tokens that an answer may go on with, looked up in texts that are there, and verified in one forward.

An answer's last tokens are looked for (three of them, then two) in its own prompt and answer and in the other answers
of its group; what followed them there is its draft. The engine feeds the draft behind the last token and samples at
every place, with the noise of that token's own number: a drafted token that is the one sampled is accepted, and the
logits behind it are those of the next one. So no token depends on what was drafted, nor when; in float32 on a CPU no
bit does (see `attention.py`), elsewhere no more than on the company.

Left out: a second model, trees of drafts.
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from spmd_rl.engine.native.attention import WIDTHS
from spmd_rl.engine.native.scheduler import RunningSequence

LENGTHS = (3, 2)
"""How many of the last tokens are looked for."""
NUM_ENDED = 8
"""Texts of ended answers that are kept for their group, while any of it runs."""
FORWARD_COST = 25
"""What a forward costs beside its tokens, in tokens; measured: docs/lab/2026-11-26-drafts-and-priorities.md."""
DRAFT_COST = 2
"""What it costs in tokens that rows differ in how much they feed, and that there is more to sample; measured there."""
SIZE = array("i").itemsize


class Drafter:
    """Gives rows their drafts, step by step."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: of a draft, at most."""
        self._num_tokens = num_tokens
        self._rows: set[RunningSequence] = set()
        """Of the step before."""
        self._ended: dict[tuple[int, ...], deque[bytes]] = {}
        self._num_accepted = self._num_rejected = 1
        """Drafted tokens of rows that have ended, with one each to begin with."""

    def propose(self, rows: Sequence[RunningSequence], filled: Callable[[int], int]) -> None:
        """Set `drafts` of those that run, where they should pay. filled: how long a forward of so many tokens is."""
        texts: dict[tuple[int, ...], dict[RunningSequence, bytes]] = defaultdict(dict)
        for row in rows:
            texts[_group(row)][row] = _text(row)
        self._ended = {group: self._ended.get(group, deque(maxlen=NUM_ENDED)) for group in texts}
        for row in self._rows.difference(rows):
            self._num_accepted += row.num_accepted
            self._num_rejected += row.num_rejected
            if _group(row) in texts:
                self._ended[_group(row)].append(_text(row))
        self._rows = set(rows)
        found: list[array] = []
        for row in rows:
            border = next((width for width in WIDTHS if width >= row.num_tokens), math.inf)
            room = min(row.request.max_new_tokens - len(row.token_ids) - 1, border - row.num_tokens)
            most = int(min(self._num_tokens, room))
            others = chain(texts[_group(row)].values(), self._ended[_group(row)])
            goes_on = most > 0 and row.num_fed == 1  # else its prompt comes first
            found.append(draft(texts[_group(row)][row], others, most) if goes_on else array("i"))
        for row, tokens, num in zip(rows, found, self._num_that_pay(rows, found, filled), strict=True):
            row.drafts = tokens[:num]

    def _num_that_pay(
        self, rows: Sequence[RunningSequence], found: Sequence[array], filled: Callable[[int], int]
    ) -> list[int]:
        """How many of the tokens found for each row are worth their cost, the likeliest first.

        Of what a row has drafted, a share was accepted; it begins with the share of those that have ended. A k-th token
        is accepted with its k-th power. In the place of filling, drafts cost `DRAFT_COST` together; beyond, as many
        tokens as the forward gets longer. Each that is accepted saves a token, and an n-th of what a forward of n rows
        costs beside its own. So a large batch drafts little, and only where it goes well.
        """
        before, chances = self._num_accepted / (self._num_accepted + self._num_rejected), []
        for number, (row, tokens) in enumerate(zip(rows, found, strict=True)):
            share = (2 * before + row.num_accepted) / (2 + row.num_accepted + row.num_rejected)
            chances += [(share**k, number) for k in range(1, len(tokens) + 1)]
        chances.sort(reverse=True)
        num_fed = sum(row.num_fed for row in rows)
        worth, taken, cost = 1 + FORWARD_COST / max(1, len(rows)), 0, DRAFT_COST
        while taken < len(chances):
            length = filled(num_fed + taken + 1)
            cost += length - filled(num_fed + taken)
            upto = length - num_fed
            if cost >= worth * sum(chance for chance, _ in chances[taken:upto]):
                break
            taken, cost = upto, 0
        counts = Counter(number for _, number in chances[:taken])
        return [counts[number] for number in range(len(rows))]


def draft(text: bytes, others: Iterable[bytes], most: int) -> array:
    """Return up to `most` token ids ('i') that may follow a text, both as bytes of ids; empty: nothing is alike.

    A text that repeats itself goes on repeating.
    """
    others = [text, *others]
    for length in LENGTHS:
        last = text[-length * SIZE :]
        for other in others:
            if (end := _find(last, other)) is not None:
                found = array("i", other[end : end + most * SIZE])
                return (found * most)[:most] if other is text else found
    return array("i")


def _find(tokens: bytes, text: bytes) -> int | None:
    """Where `tokens` end in a text for the last time, with something behind them."""
    at = text.rfind(tokens, 0, -SIZE)
    while at > 0 and at % SIZE:  # not at the border of a token
        at = text.rfind(tokens, 0, at + len(tokens) - 1)
    return None if at < 0 else at + len(tokens)


def _text(row: RunningSequence) -> bytes:
    return (row.request.prompt_ids + row.token_ids).tobytes()


def _group(row: RunningSequence) -> tuple[int, ...]:
    """What the answers to one prompt have in common: the order without answer and turn."""
    return row.request.order[:-2]
