"""The order in which a pipeline stage runs forwards and backwards: one forward, one backward (1F1B). Pure.

PipeDream-Flush (Narayanan et al., arXiv 2006.09503). torch.distributed.pipelining has the same schedule, but receives
every micro-batch into buffers of one shape; ours differ in their tokens, and every rank knows by how much.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """What a stage does next."""

    microbatch: int
    is_forward: bool


def one_forward_one_backward(stage: int, num_stages: int, count: int) -> Iterator[Step]:
    """The steps of a stage over `count` micro-batches: each forward and backward once, both in order.

    At most `num_stages - stage` micro-batches have been run forward and not yet backward: what a stage keeps of them
    does not grow with their number. The last stage, which may be the only one, goes back at once.
    """
    ahead = min(count, num_stages - stage - 1)
    for i in range(ahead):
        yield Step(i, True)
    for i in range(count):
        if ahead + i < count:
            yield Step(ahead + i, True)
        yield Step(i, False)


def forward_only(count: int) -> Iterator[Step]:
    """The steps of every stage where nothing is trained."""
    return (Step(i, True) for i in range(count))
