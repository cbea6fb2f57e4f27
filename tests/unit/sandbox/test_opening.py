"""Which sandbox is taken, and that nothing runs without one unless somebody said so."""

import os
import resource

import pytest

from spmd_rl import sandbox as package
from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import build_target
from spmd_rl.config.schema import RewardConfig
from spmd_rl.sandbox import open_sandbox
from spmd_rl.sandbox.bwrap import Bubblewrap
from spmd_rl.sandbox.forkserver import ForkServer


class Absent:
    def __init__(self) -> None:
        raise RuntimeError("it is not installed")


class Broken(package.Unconfined):
    def start(self, *args):
        raise RuntimeError("it does not start")


def test_auto_takes_the_first_that_works(monkeypatch):
    monkeypatch.setitem(package.SANDBOXES, "forkserver", Absent)
    monkeypatch.setitem(package.SANDBOXES, "bwrap", package.Unconfined)
    found = open_sandbox("auto", "reward.code.sandbox")
    assert type(found) is package.Unconfined
    found.close()


def test_without_a_sandbox_nothing_starts(monkeypatch):
    monkeypatch.setitem(package.SANDBOXES, "bwrap", Absent)
    monkeypatch.setitem(package.SANDBOXES, "forkserver", Broken)
    with pytest.raises(UserError) as error:
        open_sandbox("auto", "reward.code.sandbox")
    line = str(error.value)
    assert line.startswith("reward.code.sandbox=auto: no sandbox works here (forkserver: it does not start; ")
    assert "bwrap: it is not installed" in line and line.endswith(
        "reward.code.sandbox=none would run code from answers without any protection"
    )


def test_none_has_to_be_asked_for_and_says_so(capsys):
    found = open_sandbox("none", "reward.code.sandbox")
    assert "warning: sandbox: none" in capsys.readouterr().err
    assert found.run("print(1)").stdout == "1\n"
    assert found.check("def f(): return 1", ["assert f() == 1"]).passed == (True,)
    found.close()


def test_an_unknown_name_is_a_users_mistake():
    with pytest.raises(UserError, match="sandbox: unknown name 'docker'; known: auto, bwrap, forkserver, none"):
        RewardConfig(target="a:B", sandbox="docker")


def test_the_settings_check_builds_the_reward_without_a_sandbox():
    assert build_target("reward.code", "rewards.code:CodeReward", {})


def as_nobody(action) -> str:
    """What the action returns, or why not, in a child that is no root."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.write(writer, str(action()).encode())
        except (OSError, RuntimeError) as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to stop being it")
def test_without_root():
    assert as_nobody(ForkServer) == "it needs root"
    try:
        Bubblewrap().prove()
    except RuntimeError as error:
        pytest.skip(f"bwrap: {error}")
    program = "import os, resource\nprint(os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC))\nos.fork()"
    told = as_nobody(lambda: Bubblewrap().run(program))
    assert "65534 (64, 64)" in told and "PermissionError" in told, told


def test_the_parent_keeps_its_own_limits():
    before = [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)]
    found = open_sandbox("none", "k")
    found.close()
    after = [resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)]
    assert before == after


@pytest.mark.skipif(os.geteuid() != 0, reason="the fork server needs root")
def test_a_forkserver_that_was_killed_is_replaced():
    server = ForkServer()
    server.process.kill()
    server.process.wait()
    assert server.run("print(1)").stdout == "1\n"
    server.close()


def test_calls_from_threads_wait_for_each_other():
    from concurrent.futures import ThreadPoolExecutor

    found = open_sandbox("none", "k")
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda i: found.run(f"print({i})").stdout, range(12)))
    assert outputs == [f"{i}\n" for i in range(12)]
    found.close()


def test_descriptors_do_not_leak():
    found = open_sandbox("auto", "k")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        found.run("print(1)")
        found.check("def f(): return 1", ["assert f() == 2"])
    assert len(os.listdir("/proc/self/fd")) == before
    found.close()
