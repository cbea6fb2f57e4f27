"""The toy run of a module's tests, and its undisturbed run; a module that needs another one has its own."""

import pytest

from tests.e2e.runs import Running, Toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(request: pytest.FixtureRequest, toy: Toy) -> Running:
    """The run with the module's `SETTINGS`, in one go: the reference."""
    return toy.run(*request.module.SETTINGS, name="straight")
