"""`FairQueue`: round-robin over clients."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Items of several clients, served in turn; those of one client in order."""

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._of.values() for item in items)

    def push(self, client: Hashable, item: Item, first: bool = False) -> None:
        """Add an item behind its client's others, or `first`."""
        items = self._of.setdefault(client, OrderedDict())
        items[item] = None
        items.move_to_end(item, last=not first)
        self._size += 1

    def pop(self) -> Item:
        """Remove and return the next client's first item."""
        client, items = self._of.popitem(last=False)
        item, _ = items.popitem(last=False)
        if items:
            self._of[client] = items
        self._size -= 1
        return item

    def discard(self, client: Hashable, item: Item) -> None:
        """Remove an item from the queue, if there."""
        items = self._of.get(client)
        if items is not None and item in items:
            del items[item]
            self._size -= 1
            if not items:
                del self._of[client]
