"""Ranks that the tests of a process share."""

from collections.abc import Iterator

import pytest

from tests.dist.harness import Ranks


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    """Three ranks, of which tests mostly use the last two: a rank that does not train is met by nobody."""
    with Ranks(3) as ranks:
        yield ranks
