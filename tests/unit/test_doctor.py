"""The doctor on machines that are broken on purpose: each fault is named with its cure, and ends no other check."""

import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl import sandbox
from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.tools.doctor import machine, services
from spmd_rl.tools.doctor.__main__ import merge
from spmd_rl.tools.doctor.checks import CHECKS, Check, CheckOutcome, Failed, Skipped
from spmd_rl.tools.doctor.ranks import Ranks
from spmd_rl.tools.doctor.runner import run_checks
from tests.patience import patient

ROOT = Path(__file__).parents[2]


def settings(tmp_path: Path, *words: str) -> RlvrConfig:
    given = {"run.dir": tmp_path / "run", "policy.model": tmp_path / "model", "checkpoint.keep": 2}
    given |= dict(word.split("=", 1) for word in words)
    return load("rlvr", RlvrConfig, [f"{key}={value}" for key, value in given.items()])


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 1 MiB, which a test may mount again otherwise."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_run_directory_that_works(tmp_path: Path) -> None:
    assert "free" in machine.run_directory(settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_read_only_run_directory(tmp_path: Path, mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(Failed, match=r"run\.dir=.*cannot be written: Read-only file system") as found:
        machine.run_directory(settings(tmp_path, f"run.dir={mounted}/deep/run"))
    assert "run.dir=PATH" in found.value.cure


def test_a_run_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failed, match="Not a directory"):
        machine.run_directory(settings(tmp_path, f"run.dir={tmp_path}/file/run"))


def test_no_space(tmp_path: Path, mounted: Path) -> None:
    with pytest.raises(Failed, match="no space is left") as found:
        machine.run_directory(settings(tmp_path, f"run.dir={mounted}/run"))
    assert "free some space" in found.value.cure and not list(mounted.iterdir())


def test_no_space_for_the_checkpoints_of_a_large_model(tmp_path: Path) -> None:
    size, file = 2 * 10**12, tmp_path / "model" / "model.safetensors"
    head = b'{"w":{"dtype":"BF16","shape":[1000000,1000000],"data_offsets":[0,%d]},"__metadata__":{"a":"b"}}' % size
    file.parent.mkdir()
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(file, 8 + len(head) + size)
    with pytest.raises(Failed, match=r"checkpoint\.keep=2\) need 335\d\d\.\d GiB"):
        machine.run_directory(settings(tmp_path))


def test_a_port_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(taken))
    with pytest.raises(Failed, match=f"MASTER_PORT: port {taken} cannot be used: Address already in use") as found:
        machine.ports(settings(tmp_path))
    assert "--master-port" in found.value.cure


def test_the_sidecars_port_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(Failed, match=rf"sidecar\.bind: port {taken}") as found:
        machine.ports(settings(tmp_path, f"sidecar.bind=tcp://127.0.0.1:{taken}"))
    assert "sidecar.bind=ipc" in found.value.cure


@pytest.mark.parametrize(
    ("package", "version", "cure"),
    [("vllm", "0.10.0", "'vllm<0.33,>=0.32'"), ("vllm", "0.33.0", "vllm<0.33"), ("torch", "1.0", "'torch")],
)
def test_a_wrong_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, cure: str
) -> None:
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Failed, match=f"{package} is {version}, needed: {package}[<>]") as found:
        machine.versions(settings(tmp_path))
    assert cure in found.value.cure


def test_the_versions_here_are_right(tmp_path: Path) -> None:
    assert "torch " in machine.versions(settings(tmp_path))


def test_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing():
        raise RuntimeError("bwrap is not installed")

    def forbidden():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setitem(sandbox.SANDBOXES, "bwrap", missing)
    monkeypatch.setitem(sandbox.SANDBOXES, "forkserver", forbidden)
    with pytest.raises(Skipped, match="bwrap is not installed"):
        services.bwrap(settings(tmp_path))
    with pytest.raises(Failed, match=r"no sandbox works.*not permitted.*bwrap is not installed") as found:
        services.any_sandbox(settings(tmp_path))
    assert "install bubblewrap" in found.value.cure


def test_too_few_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(Failed, match="ulimit -n is 256") as found:
            machine.open_files(settings(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n 65536" in found.value.cure


def torchrun_of_two(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    for key, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_rank_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_of_two(monkeypatch, 0, free_port())
    ranks = Ranks.join(5.0)
    with pytest.raises(Failed, match=r"rank 1 of 2 did not arrive within 0\.2 s") as found:
        ranks.arrive(0.2)
    assert ranks.reports and "all nodes" in found.value.cure


def test_no_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_of_two(monkeypatch, 1, free_port())
    with pytest.raises(Failed, match="rank 1 cannot reach the store of rank 0"):
        Ranks.join(0.5)


def toy(name: str, limit: float = 20.0, needs: str = "") -> Check:
    return Check(name, f"tests.unit.doctor_toys:{name}", "node", limit, needs, cure="the cure")


def test_a_check_that_fails_ends_no_other(tmp_path: Path) -> None:
    checks = [toy("dies"), toy("raises"), toy("hangs", 0.5), toy("fine"), Check("after", "x:y", "node", needs="dies")]
    found = run_checks(checks, settings(tmp_path), tmp_path, Ranks())
    assert [r.verdict for r in found] == ["failed", "failed", "failed", "ok", "skipped"]
    assert "SIGKILL" in found[0].detail and "the last words" in found[0].detail
    assert found[1].detail == f"ValueError: what was wrong; log: {tmp_path}/node-1.log" and found[1].cure == "the cure"
    assert "not finished after 0.5 s" in found[2].detail and found[2].seconds < patient(5)
    assert found[4].detail == "it needs 'dies'"


def test_the_table_shows_the_gravest_failure_of_all_ranks() -> None:
    ok, own = (
        CheckOutcome("sidecar", "ok", "fine"),
        CheckOutcome("sidecar", "failed", "gone", "cure", 2.0, weight=2, at=7.0),
    )
    follows = CheckOutcome("sidecar", "failed", "ended because of rank 2", weight=0, at=5.0)
    later = CheckOutcome("sidecar", "failed", "connection closed", weight=2, at=8.0)
    (shown,) = merge({0: [ok], 1: [follows], 2: [own], 3: [later]}, {2: "hostB"})
    assert (shown.verdict, shown.detail, shown.cure) == ("failed", "rank 2 on hostB: gone", "cure")


def test_nodes_of_different_versions_are_a_failure() -> None:
    rows = {rank: [CheckOutcome("versions", "ok", f"torch 2.1{rank // 2}")] for rank in (0, 2)}
    (shown,) = merge(rows, {0: "hostA", 2: "hostB"})
    assert shown.verdict == "failed" and "rank 2 on hostB has torch 2.11" in shown.detail


def test_every_check_can_be_found_and_needs_an_earlier_one() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for number, check in enumerate(CHECKS):
        assert not check.needs or check.needs in names[:number]
        module, _, function = check.target.partition(":")
        assert function in (ROOT / f"spmd_rl/tools/doctor/{module}.py").read_text()


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "spmd_rl", "doctor", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_the_command_line(tmp_path: Path, taken: int) -> None:
    words = ("--only", "ports,open", f"run.dir={tmp_path}/run")
    good = doctor(*words, MASTER_PORT=str(free_port()))
    assert good.returncode == 0 and "3 ok" in good.stdout, good.stdout + good.stderr
    bad = doctor(*words, MASTER_PORT=str(taken))
    assert bad.returncode == 1 and "2 ok, 1 failed" in bad.stdout and "torchrun --standalone" in bad.stdout
    unknown = doctor("stepz=3")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: stepz")
