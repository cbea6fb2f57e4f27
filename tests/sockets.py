"""ZeroMQ sockets of tests: one that waits for what never comes fails its test, and nothing of it is left."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from tests.patience import patient


@contextmanager
def context() -> Iterator[zmq.Context]:
    """A context whose sockets send and receive for five seconds at most, and are closed with it whatever raises."""
    made = zmq.Context()
    made.setsockopt(zmq.LINGER, 0)
    for limit in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        made.setsockopt(limit, int(patient(5000)))
    try:
        yield made
    finally:
        made.destroy(linger=0)
