"""`RowSource`: the rows of a supervised run as samples, step by step.

The rows of a step depend on the seed and the step's number. Each rank renders its part; the plan then assigns samples
to trainer ranks, as after a rollout.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from spmd_rl.base.errors import UserError, tell
from spmd_rl.config.sections.rows import RowsConfig, ValidationConfig
from spmd_rl.data.row_store import Examples, RowStore
from spmd_rl.distributed import World
from spmd_rl.rollout.collected import Collected, whole
from spmd_rl.types import Conversation, Example, Group, Prompt, Sample, Turn, Verdict
from spmd_rl.types.pictures import pictures_of, split_pictures

CHOSEN, REJECTED, MISMATCHED = 0, 1, 2
"""Answer numbers: the sides of a pair, a single good or bad answer, and another row's answer."""
Pieces = list[tuple[array, array]]
"""Alternating prompt and learnt token ids ('i')."""
Render = Callable[[Conversation], Pieces]


class RowSource:
    """Rendered rows. State: the dataset's fingerprint and the number of finished rows."""

    def __init__(
        self,
        examples: Examples,
        data: RowsConfig,
        validation: ValidationConfig,
        render: Render,
        world: World,
        seed: int,
        num_rows: int | None = None,
        mismatched: bool = False,
    ) -> None:
        """num_rows: rows after which the run ends, perhaps within a step. mismatched: add another prompt's answer to
        each row, as `MISMATCHED`.
        """
        self._examples, self._data, self._validation = examples, data, validation
        self._render, self._world, self._seed, self._end = render, world, seed, num_rows
        self._done, self._mismatched, self._warned = 0, mismatched, False
        self.reference: dict[str, np.ndarray] = {}
        """Logprob of each answer under the reference, in nats: float32 [rows, 3] by `train` and `eval`; they become
        `Sample.targets`. Without a reference, the first answer's targets are `Example.values`.
        """

    def collect(self, step: int) -> Collected:
        """[all] Return the rows of a training step; a group's ticket is its position in the run."""
        store, size = self._examples.train, self._data.rows_per_step
        begin, end = (step - 1) * size, step * size
        positions = range(begin, end if self._end is None else min(end, self._end))
        self._done = positions.stop
        return self._collect(step, store, [(place, store.at(place, self._seed)[1]) for place in positions])  # [all]

    def held_out(self, step: int, steps: int) -> Iterator[Collected]:
        """[all] Yield the held-out rows in steps; none unless an evaluation is due after `step`."""
        store, size = self._examples.eval, self._data.rows_per_step
        count = min(len(store), self._validation.rows or len(store)) if self._validation.is_due(step, steps) else 0
        dropped = 0
        for begin in range(0, count, size):
            chosen = range(begin, min(begin + size, count))
            collected = self._collect(step, store, [(number, number) for number in chosen])  # [all]
            dropped += num_empty(collected)
            yield collected
        if dropped and not self._warned and self._world.rank == 0:
            tell(
                f"warning: {dropped} of {count} held-out rows are left out of val/*, which are longer than "
                f"data.max_tokens={self._data.max_tokens} or leave no token to learn"
            )
        self._warned = self._warned or bool(dropped)

    def shown(self, number: int, answer: int) -> Conversation | None:
        """Return an answer of a held-out row as written; None if another row's."""
        example = self._examples.eval[number]
        return dict(enumerate(example.conversations, example.first)).get(answer)

    def metrics(self, collected: Collected) -> dict[str, float]:
        """Return the progress through the data, and sizes of the step."""
        tokens, epoch = int(collected.table.answers["num_tokens"].sum()), self._done / len(self._examples.train)
        return {"data/epoch": epoch, "data/overlong": num_empty(collected), "tokens": tokens}

    def num_rows(self, name: str) -> int:
        """Return the number of `train` or `eval` rows."""
        return len(getattr(self._examples, name))

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return {"digest": self._examples.train.digest, "done": self._done}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state. UserError for a checkpoint of other rows."""
        if state["digest"] != self._examples.train.digest:
            raise UserError(
                "data.train: its rows are not those that the checkpoint was trained on; choose another run.dir"
            )
        self._done = state["done"]

    def parts(self, steps: int) -> Iterator[tuple[str, list[int], Collected]]:
        """[all] Yield all rows of a run of `steps` in the groups of its first epoch: `train` or `eval`, row numbers,
        samples.
        """
        size, train = self._data.rows_per_step, len(self._examples.train)
        for step in range(1, min(steps, -(-train // size)) + 1):
            collected = self.collect(step)  # [all]
            tickets = collected.table.tickets.tolist()
            yield "train", [self._examples.train.at(ticket, self._seed)[1] for ticket in tickets], collected
        for collected in self.held_out(0, steps):  # [all]
            yield "eval", collected.table.tickets.tolist(), collected

    def _collect(self, step: int, store: RowStore, tickets: Sequence[tuple[int, int]]) -> Collected:
        """[all] Return rows of all ranks. tickets: (ticket, row number) pairs."""
        with self._world.phase("data"):
            mine = tickets[self._world.rank :: self._world.size]
            groups = [self._group(store, ticket, number) for ticket, number in mine]
            return Collected.given(step, whole(groups), [ticket for ticket, _ in tickets], self._world)  # [all]

    def _group(self, store: RowStore, ticket: int, number: int) -> Group:
        example = store[number]
        answers = dict(enumerate(example.conversations, example.first))
        if self._mismatched:
            answers[MISMATCHED] = _exchanged(example, self._other(store, number, example))
        texts = {answer: self._pieces(conversation, store, number) for answer, conversation in answers.items()}
        pictures = {answer: pictures_of(conversation.messages) for answer, conversation in answers.items()}
        known = self.reference.get("train" if store is self._examples.train else "eval")
        values = [example.values, (), ()] if known is None else [(value,) for value in known[number].tolist()]
        if not all(texts.values()):  # a pair without one of its sides is none
            texts = {}
        verdict = Verdict("ok", sum(example.values) / len(example.values))
        samples = [
            # A row that was cut may have fewer turns than labels.
            Sample(ticket, answer, turns, verdict, unit=0, targets=tuple(values[answer][: len(turns)]))
            for answer, turns in ((answer, _turns(text, pictures[answer])) for answer, text in texts.items())
        ]
        return Group(Prompt(str(number), (), "rows", ""), ticket, tuple(samples))

    def _other(self, store: RowStore, number: int, example: Example) -> Example:
        """Return a row with another prompt, for the baseline of KTO; if no held-out row has one, a training row."""
        # Shifting by the longest run of rows with one prompt uses each answer once. The next row with another prompt
        # follows if that fails.
        run, size = store.prompt_run, len(store)
        later = (store[(number + step) % size] for step in (*range(run, size), *range(1, run)))
        training = (self._examples.train[index] for index in range(len(self._examples.train)))
        prompt = example.conversations[0].prompt
        return next(other for other in chain(later, training) if other.conversations[0].prompt != prompt)

    def _pieces(self, conversation: Conversation, store: RowStore, number: int) -> Pieces:
        most, what = self._data.max_tokens, self._data.overlong
        try:
            pieces = self._render(conversation)
        except UserError as error:
            raise UserError(f"{store.where(number)}: {error}") from None
        length = sum(len(part) for pair in pieces for part in pair)
        if length > most and what == "error":
            raise UserError(f"data.max_tokens={most}: {store.where(number)} has {length} tokens")
        if length > most:
            pieces = _cut(pieces, most) if what == "cut" else []
        # Cutting may leave an answer without a learnt token, which is nothing to train on.
        return pieces if all(learnt for _, learnt in pieces) else []


def num_empty(collected: Collected) -> int:
    """Return the number of rows without a sample: too long, or nothing to learn."""
    return len(collected.table) - len(set(collected.table.answers["ticket"].tolist()))


def _turns(pieces: Pieces, pictures: tuple[bytes, ...]) -> tuple[Turn, ...]:
    zeros = [bytes(4 * len(learnt)) for _, learnt in pieces]
    shown = split_pictures([given for given, _ in pieces], pictures)
    return tuple(
        Turn(given, learnt, array("f", none), array("i", none), "stop", pictures=own)
        for (given, learnt), none, own in zip(pieces, zeros, shown, strict=True)
    )


def _exchanged(example: Example, other: Example) -> Conversation:
    own, theirs = example.conversations[0], other.conversations[0]
    return Conversation(own.prompt + theirs.messages[theirs.num_given :], own.num_given, own.is_plain)


def _cut(pieces: Pieces, most: int) -> Pieces:
    kept: Pieces = []
    for given, learnt in pieces:
        learnt = learnt[: max(0, most - len(given))]
        if not learnt:
            break
        kept.append((given, learnt))
        most -= len(given) + len(learnt)
    return kept
