"""A request that the run save its current step and end: the signal that asked for it, in the store of all ranks.

Any rank may receive the signal. Trainer ranks agree on it in a collective of each step (`track.Run`), so all save and
end after the same step.
"""

import signal

import torch.distributed as dist

_ACCEPTED, _COUNT, _SIGNAL = "stop/accepted", "stop/count", "stop/signal"


class StopRequest:
    """The request of one job. Every rank has one, over the same keys."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def accept(self) -> None:
        """Treat signals as requests from now on: the run ends after the step in progress, which is saved."""
        self._store.set(_ACCEPTED, "1")

    def refuse(self) -> None:
        """End the run at once on a signal again."""
        self._store.delete_key(_ACCEPTED)

    def ask(self, signum: signal.Signals) -> int:
        """Return 0 if requests are not accepted, else the number of this request; the first one counts."""
        if not self._store.check([_ACCEPTED]):
            return 0
        number = self._store.add(_COUNT, 1)
        if number == 1:
            self._store.set(_SIGNAL, str(signum.value))
        return number

    def asked(self) -> int:
        """Return the number of the signal that asked, 0 without one. Ranks may see it at different times."""
        return int(self._store.get(_SIGNAL)) if self._store.check([_SIGNAL]) else 0
