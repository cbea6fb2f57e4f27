"""Each test here runs in each sandbox: bubblewrap, and the fork server.

What is about files or the network, marked `mounts`, runs in a fork server without mounts and namespaces too. Of a file
marked `judge`, which is about what is made of a program's results, the rest runs in the fork server, and in bubblewrap
only where slow tests run: what the judge says does not depend on the walls around the program.
"""

import contextlib
import os
from pathlib import Path

import pytest

from spmd_rl.sandbox.bwrap import Bubblewrap
from spmd_rl.sandbox.forkserver import ForkServer
from spmd_rl.types import RunLimits

MAKERS = {"bwrap": Bubblewrap, "forkserver": ForkServer, "forkserver-unmounted": lambda: ForkServer(mounts=False)}
TIGHT = RunLimits(cpu_seconds=1, wall_seconds=8.0, memory_bytes=256 << 20, disk_bytes=4 << 20)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sandbox" in metafunc.fixturenames:
        everywhere = metafunc.definition.get_closest_marker("mounts") is not None
        judge = metafunc.definition.get_closest_marker("judge") is not None and not everywhere
        names = [name for name in MAKERS if everywhere or name != "forkserver-unmounted"]
        marks = {"bwrap": pytest.mark.slow} if judge else {}
        chosen = [pytest.param(name, marks=marks.get(name, ())) for name in names]
        metafunc.parametrize("sandbox", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def sandbox(request):
    yield from opened(request.param)


WHOLE = [pytest.param((name, 1), id=name, marks=pytest.mark.slow) for name in MAKERS]


@pytest.fixture(scope="session", params=[pytest.param(("forkserver", 6), id="sample"), *WHOLE])
def sampled(request):
    """A sandbox and a number n: of many cases, every n-th is run in it. All of them are, in each sandbox, where slow
    tests are."""
    name, every = request.param
    for made in opened(name):
        yield made, every


def opened(name):
    """Yield the sandbox of that name; skip the test where there is none."""
    try:
        made = MAKERS[name]()
    except RuntimeError as error:
        pytest.skip(f"{name}: {error}")
    try:
        made.prove()
    except RuntimeError as error:  # where users may make no namespaces, bwrap is there and cannot work
        if name != "bwrap":
            raise
        pytest.skip(f"bwrap: {error}")
    made.name = name
    made.idle = boxed(made)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every attack: no process of the box's user ids lives, and the next run is as if nothing had been."""
    yield
    if "sandbox" in request.fixturenames:
        made = request.getfixturevalue("sandbox")
        assert boxed(made) == made.idle
        made.prove()


def boxed(made) -> list[int]:
    """The processes of a sandbox's user ids: none, or bubblewrap and its server."""
    return sorted(pid for pid, uid in processes() if uid in (made.first_uid, made.first_uid + 1))


def processes(dead: bool = True) -> list[tuple[int, int]]:
    """(pid, user id) of all processes of this machine; `dead`: those too that nobody has reaped."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                uid = os.stat(f"/proc/{name}").st_uid
                if dead or Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append((int(name), uid))
    return found
