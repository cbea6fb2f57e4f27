"""`data.mix`: which domain a ticket belongs to, so that every stretch of a run has the mix asked for.

    mix = Mix({"math": 0.4, "code": 0.3, "general": 0.3})
    domain, place = mix.ticket(17)      # the 18th ticket is the `place`-th (from 0) of its domain

A function of the ticket's number alone: nothing is drawn, nothing is kept between tickets, a resume goes on with it.
Leaves out which prompt the place is (`prompts.py`).
"""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from spmd_rl.errors import UserError

MAX_PERIOD = 100_000
"""Tickets after which the assignment repeats at the latest: shares of up to five digits."""


class Mix:
    """Of the first n tickets, for every n, each domain has its share of n to within less than one ticket.

    Tijdeman 1980, "The chairman assignment problem", theorem 1: a domain may come if its arrears are large enough, and
    of those the one comes whose place would be overdue first. With k domains none is ever off by more than
    1 - 1/(2k - 2). Taking the one most in arrears has no such bound.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        """`shares`: relative, at least one above 0. UserError if they repeat only after `MAX_PERIOD` tickets."""
        exact = {domain: Fraction(str(share)) for domain, share in sorted(shares.items()) if share > 0}
        assert exact, "no share above 0"
        scaled = {domain: share / sum(exact.values()) for domain, share in exact.items()}
        self._period = lcm(*(share.denominator for share in scaled.values()))
        if self._period > MAX_PERIOD:
            raise UserError(
                f"data.mix: {dict(shares)} comes out even only after {self._period} tickets: use fewer digits"
            )
        self._weights = {domain: int(share * self._period) for domain, share in scaled.items()}
        self._assigned = self._assign()

    def ticket(self, ticket: int) -> tuple[str, int]:
        """The ticket's domain, and its place (from 0) among that domain's tickets."""
        cycle, place = divmod(ticket, self._period)
        domain, earlier = self._assigned[place]
        return domain, cycle * self._weights[domain] + earlier

    def _assign(self) -> list[tuple[str, int]]:
        """Domain and place of each ticket of a period."""
        counts = dict.fromkeys(self._weights, 0)
        slack = max(2 * len(counts) - 2, 1)
        assigned = []
        for number in range(1, self._period + 1):
            # Arrears in units of 1 / (slack * period) tickets: all in whole numbers.
            arrears = {d: slack * (w * number - self._period * counts[d]) for d, w in self._weights.items()}
            ready = [domain for domain, late in arrears.items() if late >= self._period]
            domain = min(ready, key=lambda d: ((slack - 1) * self._period - arrears[d]) / self._weights[d])
            assigned.append((domain, counts[domain]))
            counts[domain] += 1
        return assigned
