"""`data.mix`: assigns a domain to each ticket so that every part of a run has the requested shares.

mix = Mix({"math": 0.4, "code": 0.3, "general": 0.3})
domain, index = mix.ticket(17)      # ticket 17 is number `index` (from 0) of the tickets of its domain
"""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from spmd_rl.base.errors import UserError

MAX_PERIOD = 100_000
"""Tickets after which the assignment must repeat: shares have up to five digits"""


class Mix:
    """Assigns domains to tickets: of the first n tickets, for every n, each domain has its share to within one ticket.

    Source: Tijdeman 1980, "The chairman assignment problem", theorem 1. With k domains no count is ever off by more
    than 1 - 1/(2k - 2).
    """

    def __init__(self, shares: Mapping[str, float | Fraction], key: str = "data.mix") -> None:
        """shares: relative, at least one above 0. key: of the settings. UserError if their period exceeds `MAX_PERIOD`
        tickets.
        """
        # Fractions: floats such as 0.1 would have no common period.
        exact = {domain: Fraction(str(share)) for domain, share in sorted(shares.items()) if share > 0}
        assert exact, "no share is above 0"
        scaled = {domain: share / sum(exact.values()) for domain, share in exact.items()}
        self._period = lcm(*(share.denominator for share in scaled.values()))
        if self._period > MAX_PERIOD:
            raise UserError(f"{key}: {dict(shares)} repeats only after {self._period} tickets: use fewer digits")
        self._weights = {domain: int(share * self._period) for domain, share in scaled.items()}
        self._assigned = self._assign()

    def ticket(self, ticket: int) -> tuple[str, int]:
        """Return a ticket's domain and its index (from 0) there."""
        cycle, offset = divmod(ticket, self._period)
        domain, earlier = self._assigned[offset]
        return domain, cycle * self._weights[domain] + earlier

    def _assign(self) -> list[tuple[str, int]]:
        counts = dict.fromkeys(self._weights, 0)
        slack = max(2 * len(counts) - 2, 1)
        # A domain is eligible if it lags far enough behind its share; of these, the one with the earliest deadline is
        # next. Taking the one that lags most has no bound.
        assigned = []
        for number in range(1, self._period + 1):
            # Lags are whole numbers, in units of 1 / (slack * period) tickets.
            lags = {d: slack * (w * number - self._period * counts[d]) for d, w in self._weights.items()}
            eligible = [domain for domain, lag in lags.items() if lag >= self._period]
            domain = min(eligible, key=lambda d: ((slack - 1) * self._period - lags[d]) / self._weights[d])
            assigned.append((domain, counts[domain]))
            counts[domain] += 1
        return assigned
