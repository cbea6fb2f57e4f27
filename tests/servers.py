"""Training ranks' servers and generating ranks' clients, for tests without a run around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

from spmd_rl.curve_keys import ClientKeys, HostKeys
from spmd_rl.split.client import TrainerClient
from spmd_rl.split.messages import News
from spmd_rl.split.seal import Seal
from spmd_rl.split.server import TrainerServer

SEAL = Seal(bytes(32))


def serve(where: Path | str, count: int = 1, keys: HostKeys | None = None, **lease: float) -> list[TrainerServer]:
    """Servers of so many training ranks, in a folder or at a `tcp://` address."""
    binds = [where if "://" in str(where) else f"ipc://{where}/{rank}/x" for rank in range(count)]
    return [TrainerServer(bind, SEAL, 1 << 20, keys, **lease) for bind in binds]


class Quiet(SimpleNamespace):
    """A link that never beats."""

    def __init__(self, member: int) -> None:
        super().__init__(membership=SEAL.membership(member), news=News(True), ready=False, journal=self)

    def check(self) -> None:
        """See `Link`."""

    @contextmanager
    def blocked(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """See `Journal`."""
        yield

    def wait(self) -> None:
        """See `Link`."""

    def give_up(self) -> None:
        """See `Link`."""

    def close(self) -> None:
        """See `Link`."""


def connect(
    addresses: Sequence[str],
    member: int = 0,
    keys: ClientKeys | None = None,
    progress: Callable[[], None] = lambda: None,
    stack: ExitStack | None = None,
) -> TrainerClient:
    """A client of a member; `stack` closes it."""
    client = TrainerClient(Quiet(member), addresses, progress, keys)
    if stack is not None:
        stack.callback(client.close)
    return client
