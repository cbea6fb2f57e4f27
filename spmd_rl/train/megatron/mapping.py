"""Location of each Hugging Face weight in Megatron's parameters, for both directions.

    NAMES = {"decoder.layers.{}.mlp.linear_fc1.weight": Stacked("...gate_proj.weight", "...up_proj.weight"), ...}
    for piece in rule.pieces(shapes, TensorShare(tp_rank, tp_size)): ...

`architectures/` gives each parameter a rule, which lists the pieces of stored tensors in a rank's part. Reading,
publishing and saving loop over pieces.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spmd_rl.model.load import Region

Shapes = Callable[[str], tuple[int, ...]]
"""Function from a stored tensor's name to its whole shape."""


class TensorShare(NamedTuple):
    """Tensor-parallel position of a rank."""

    rank: int
    size: int
    head_dim: int


class Piece(NamedTuple):
    """A region of a stored tensor, and its place in a rank's parameter."""

    name: str
    shape: tuple[int, ...]
    stored: Region
    region: Region


class Rule(ABC):
    """Composition of a parameter from stored tensors, named with `{}` for a layer's, then an expert's number."""

    is_cut, is_buffer = True, False
    """Flags: tensor-parallel ranks have different parts; it is always float32, without gradient"""

    def __init__(self, *names: str) -> None:
        self.names = names

    def named(self, *numbers: int) -> "Rule":
        """Return the rule of one layer, or of an expert of it."""
        return type(self)(*(name.format(*numbers) for name in self.names))

    @abstractmethod
    def shape(self, shapes: Shapes, share: TensorShare) -> tuple[int, ...]:
        """Return the shape of a rank's parameter."""

    @abstractmethod
    def pieces(self, shapes: Shapes, share: TensorShare) -> Iterator[Piece]:
        """Yield a rank's pieces; elements in none are padding."""


class Whole(Rule):
    """One stored tensor, whole on every rank."""

    is_cut = False

    def shape(self, shapes: Shapes, share: TensorShare) -> tuple[int, ...]:
        """Return the stored tensor's whole shape."""
        return shapes(self.names[0])

    def pieces(self, shapes: Shapes, share: TensorShare) -> Iterator[Piece]:
        """Yield one piece, the whole tensor."""
        everything = _all(shapes(self.names[0]))
        yield Piece(self.names[0], shapes(self.names[0]), everything, everything)


class Buffer(Whole):
    """One buffer of transformers' module, whole on every rank."""

    is_buffer = True


class Stacked(Rule):
    """Row spans of stored tensors, stacked; the last rank may have padding."""

    def shape(self, shapes: Shapes, share: TensorShare) -> tuple[int, ...]:
        """Return the shape with padded rows."""
        rows = sum(-(-shapes(name)[0] // share.size) for name in self.names)
        return (rows, *shapes(self.names[0])[1:])

    def pieces(self, shapes: Shapes, share: TensorShare) -> Iterator[Piece]:
        """Yield a span of each tensor's rows."""
        place = 0
        for name in self.names:
            num_rows, *rest = shapes(name)
            count = -(-num_rows // share.size)
            begin, end = share.rank * count, min(num_rows, (share.rank + 1) * count)
            if end > begin:
                others = _all(tuple(rest))
                yield Piece(
                    name, shapes(name), (slice(begin, end), *others), (slice(place, place + end - begin), *others)
                )
            place += count


class Columns(Rule):
    """A span of a stored tensor's columns."""

    def shape(self, shapes: Shapes, share: TensorShare) -> tuple[int, ...]:
        """Return the shape of a column span."""
        num_rows, num_columns = shapes(self.names[0])
        return num_rows, num_columns // share.size

    def pieces(self, shapes: Shapes, share: TensorShare) -> Iterator[Piece]:
        """Yield a span of the columns."""
        num_rows, width = self.shape(shapes, share)
        here = slice(share.rank * width, (share.rank + 1) * width)
        rows = slice(0, num_rows)
        yield Piece(self.names[0], shapes(self.names[0]), (rows, here), (rows, slice(0, width)))


class Heads(Rule):
    """Queries, keys and values, grouped by key-value head."""

    def shape(self, shapes: Shapes, share: TensorShare) -> tuple[int, ...]:
        """Return the shape of a rank's heads."""
        return (sum(shapes(name)[0] for name in self.names) // share.size, *shapes(self.names[0])[1:])

    def pieces(self, shapes: Shapes, share: TensorShare) -> Iterator[Piece]:
        """Yield each head's queries, key and value."""
        num_groups = shapes(self.names[1])[0] // share.head_dim
        # Rows of one key-value head in each tensor.
        counts = [shapes(name)[0] // num_groups for name in self.names]
        own = num_groups // share.size
        for group in range(own):
            place = group * sum(counts)
            for name, count in zip(self.names, counts, strict=True):
                begin, others = (share.rank * own + group) * count, _all(shapes(name)[1:])
                stored = slice(begin, begin + count), *others
                yield Piece(name, shapes(name), stored, (slice(place, place + count), *others))
                place += count


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Region]:
    """Yield the elements `begin` to `end` of a 1- or 2-dimensional tensor as regions, in order."""
    if len(shape) == 1:
        yield (slice(begin, end),)
        return
    width = shape[1]
    while begin < end:
        row, column = divmod(begin, width)
        if column or end - begin < width:
            stop = min(width, column + end - begin)
            yield slice(row, row + 1), slice(column, stop)
            begin += stop - column
        else:
            stop = end // width
            yield slice(row, stop), slice(0, width)
            begin = stop * width


def _all(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, size) for size in shape)
