"""A store in memory that answers like a `TCPStore` and counts what it is asked."""


class CountingStore:
    """See `coordinator.Store`. It takes no time, so that no replica ever loses a race in it."""

    def __init__(self) -> None:
        self.operations = 0
        """All that was asked but looks."""
        self.looks = 0
        """Questions whether the step has ended, or another ticket may start."""
        self._values: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: str) -> bytes:
        """Return what is there, or 0: the own look of the simulation, which does not count."""
        return self._values.get(key, b"0")

    def _count(self, key: str, look: bool) -> None:
        if look and key.endswith(("/rejected", "/end")):
            self.looks += 1
        else:
            self.operations += 1

    def add(self, key: str, amount: int) -> int:
        """The counter's new value."""
        self._count(key, look=amount == 0)
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % value
        return value

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._count(key, look=False)
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Read what is there; KeyError if nothing is."""
        self._count(key, look=False)
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read what is there; KeyError if one is not."""
        self._count(keys[0], look=False)
        return [self._values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        self._count(keys[0], look=True)
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forget."""
        self._count(key, look=False)
        return self._values.pop(key, None) is not None
