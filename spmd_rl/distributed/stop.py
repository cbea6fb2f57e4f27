"""A request to save the current step and end: its signal, in all ranks' store.

Any rank may get the signal. Trainer ranks agree on it in a collective of each step (`track.Run`), so all end after the
same step.
"""

import signal

import torch.distributed as dist

_ACCEPTED, _COUNT, _SIGNAL = "stop/accepted", "stop/count", "stop/signal"


class StopRequest:
    """The job's request, over the same keys on each rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def accept(self) -> None:
        """Treat signals as requests: the run ends after the step in progress, saved."""
        self._store.set(_ACCEPTED, "1")

    def refuse(self) -> None:
        """End the run at once on later signals."""
        self._store.delete_key(_ACCEPTED)

    def ask(self, signum: signal.Signals) -> int:
        """Return this request's number, of which the first counts; 0 if requests are refused."""
        if not self._store.check([_ACCEPTED]):
            return 0
        number = self._store.add(_COUNT, 1)
        if number == 1:
            self._store.set(_SIGNAL, str(signum.value))
        return number

    def asked(self) -> int:
        """Return the number of the asking signal, or 0. Ranks may see it at different times."""
        return int(self._store.get(_SIGNAL)) if self._store.check([_SIGNAL]) else 0
