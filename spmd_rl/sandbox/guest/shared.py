"""The mutable containers that tests and code both have, by number, whoever made them: what either does to one of them
crosses with the next message, so that a list is one list on both sides, as in one process."""

import sys

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.arrays import refuse_mixed

_ONE = {0: []}
_ALONE = sys.getrefcount(_ONE[0])  # of a container that a dictionary has and nobody else
FEW = 64  # so many are always looked through for those that nobody has any more; of more, when they have doubled


class Shared:
    """One side's containers. `sign` of the numbers that it gives: 1 or -1."""

    def __init__(self, sign):
        self._sign, self._last, self._kept = sign, 0, 0
        self._things, self._numbers, self._before = {}, {}, {}
        self._changed, self._fresh, self.gone = (), {}, []

    def pack(self, roots, other, record=None, release=False):
        """Return references to the roots, and nodes, with those of the containers that have changed. If they are sent,
        `sent` is called. `release`: forget the containers that nobody has here; their numbers are then in `gone`."""
        now = {number: values.contents(self._things[number]) for number in self._before}
        self._changed = {number for number in now if not values.same_items(now[number], self._before[number])}
        if release and (len(self._things) <= FEW or len(self._things) > 2 * self._kept):
            self._release()
        self._fresh = {}
        roots = [*roots, *map(self._things.__getitem__, self._changed)]
        refs, nodes = values.encode(roots, other, self._known, self._number, record)
        refuse_mixed(self._fresh.values(), map(self._things.__getitem__, self._before))
        return refs[: len(refs) - len(self._changed)], nodes

    def sent(self):
        """Note that what was packed last is known to the other side."""
        self._last += self._sign * len(self._fresh)
        self.gone.clear()
        self._note({**self._fresh, **{number: self._things[number] for number in self._changed}})

    def unpack(self, refs, nodes, special, gone=()):
        """Return the values of references, and change the containers that the other side has changed."""
        for number in gone:
            self._forget(number)
        found = values.decode(refs, nodes, {**special, "known": self._things.__getitem__}, self._things)
        told = {node[3] for node in nodes if node[0] in values.NUMBERED and len(node) > 3}
        if any(n * self._sign > 0 and self._numbers.get(id(self._things[n])) != n for n in told):
            raise ValueError(told)
        self._note({number: self._things[number] for number in told})
        return found

    def _note(self, things):
        self._things.update(things)
        for number, thing in things.items():
            self._numbers[id(thing)], self._before[number] = number, values.contents(thing)
            if self._before[number] is None:
                del self._before[number]

    def _known(self, value):
        number = self._numbers.get(id(value))
        return None if number in self._changed else number

    def _number(self, value):
        number = self._numbers.get(id(value)) or self._last + self._sign * (len(self._fresh) + 1)
        if id(value) not in self._numbers:
            self._fresh[number] = value
        return number

    def _forget(self, number):
        del self._numbers[id(self._things.pop(number))]
        self._before.pop(number, None)

    def _release(self):
        """Forget what only we have. What is in that is forgotten the next time."""
        alone = [n for n in self._things if n not in self._changed and sys.getrefcount(self._things[n]) == _ALONE]
        for number in alone:
            self._forget(number)
        self.gone += alone
        self._kept = len(self._things)
