"""A sandbox by bubblewrap, with the system's Python, at 10 ms a run and up. It works for root and for other users.

The code is confined by namespaces of its own for everything, `/usr` as the only part of the host's files (read-only),
an empty environment, hard limits and, on x86-64, the same seccomp list as the fork server's (elsewhere there is none,
and `processes: 1` means 64). For root it also gets a user id that nobody else has, since bubblewrap is weaker as root.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.base import BaseSandbox, ChildFiles
from spmd_rl.sandbox.forkserver import reserve_uids
from spmd_rl.sandbox.packages import ENVIRONMENT
from spmd_rl.types import RunLimits

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
"""Interpreters below `/usr`; another user id could not run one in somebody's home directory."""
GUEST = "spmd_rl/sandbox/guest"
PACKAGES, PACKAGES_BYTES = "/packages", 512 << 20
"""Where code finds the packages that it may import, and the address space that it gets for them."""
COMPILE = """
import importlib.util, json, marshal, sys, zipfile
assert sys.version_info >= (3, 8)
with zipfile.ZipFile(sys.stdout.buffer, "w") as archive:
    for name, source in json.load(sys.stdin).items():
        code = marshal.dumps(compile(source, name, "exec"))
        archive.writestr(name + "c", importlib.util.MAGIC_NUMBER + bytes([1]) + bytes(11) + code)
"""
"""Run by the system's Python: makes an archive of the guest's modules that it can import without compiling."""
FILES = [
    "--ro-bind",
    "/usr",
    "/usr",
    "--dev-bind",
    "/dev/null",
    "/dev/null",
    "--dev-bind",
    "/dev/urandom",
    "/dev/urandom",
]


class Bubblewrap(BaseSandbox):
    """Starts one `bwrap` for each job. RuntimeError at construction where it cannot work."""

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        """`packages`: the files that code may import, as `find_packages` returns them."""
        super().__init__()
        confine.call("prctl", confine.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a container's first process may not reap
        self._bwrap = shutil.which("bwrap")
        if self._bwrap is None:
            raise RuntimeError("bwrap is not installed")
        self._python = next((path for path in PYTHONS if os.access(path, os.X_OK) and _suits(path, packages)), None)
        if self._python is None:
            which = f" of version {_VERSION}, for which the packages are installed," if packages else ""
            raise RuntimeError(f"there is no {' or '.join(PYTHONS)}{which} to run in it")
        self.first_uid = reserve_uids() if os.geteuid() == 0 else None
        self._guest = _compiled_guest(self._python)
        self._layout = list(FILES)
        for name in ("lib", "lib32", "lib64", "bin"):  # sockets on a merged /usr
            path = f"/{name}"
            if os.path.islink(path):
                self._layout += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                self._layout += ["--ro-bind", path, path]
        path = "/guest.zip"
        if packages:
            path, self.own_bytes = f"{path}:{PACKAGES}", PACKAGES_BYTES
            for name, source in packages.items():
                self._layout += ["--ro-bind", str(source.resolve()), f"{PACKAGES}/{name}"]
            for name, value in ENVIRONMENT.items():
                self._layout += ["--setenv", name, value]
        self._layout += ["--setenv", "PYTHONPATH", path]

    def start(self, slot: int, limits: RunLimits, files: ChildFiles) -> "Spawned":
        """Start a job, as `BaseSandbox.start` says."""
        code = f"from spmd_rl.sandbox.guest.main import main; main({files.job}, {files.report}, {files.rpc})"
        guest = memory_file(self._guest)
        filters = []
        if confine.seccomp_supported():
            filters.append(memory_file(confine.seccomp_program(limits.processes > 1, execute=True)))
        command = [self._bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *self._layout]
        command += ["--ro-bind-data", str(guest), "/guest.zip"]
        command += ["--setenv", "PYTHONHASHSEED", "0", "--uid", "65534", "--gid", "65534", "--hostname", "box"]
        command += [
            "--size",
            str(max(limits.disk_bytes, 4096)),
            "--tmpfs",
            "/box",
            "--chdir",
            "/box",
            "--remount-ro",
            "/",
        ]
        info, theirs_info = os.pipe()
        command += ["--info-fd", str(theirs_info)]
        command += [word for fd in filters for word in ("--seccomp", str(fd))]
        command += ["--", self._python, "-s", "-S", "-B", "-X", "utf8", "-c", code]
        theirs = [files.job, files.report, guest, theirs_info, *filters] + [files.rpc][: files.rpc >= 0]
        as_nobody = (
            {}
            if self.first_uid is None
            else {
                "user": self.first_uid + slot,
                "group": self.first_uid + slot,
                "extra_groups": [],
            }
        )
        try:
            process = subprocess.Popen(
                command,
                stdin=files.stdin,
                stdout=files.stdout,
                stderr=files.stderr,
                pass_fds=theirs,
                env={},
                cwd="/",
                **as_nobody,
            )
        finally:
            for fd in (guest, theirs_info, *filters):
                os.close(fd)
        return _Bwrapped(process, info)


_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def _suits(python: str, packages: Mapping[str, Path] | None) -> bool:
    """Return whether an interpreter can import what is installed for ours."""
    if not packages:
        return True
    command = [python, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, env={}, timeout=60).stdout.strip() == _VERSION


class Spawned:
    """A confined process that is a child of ours."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._pidfd

    def kill(self) -> None:
        """Kill the process. What it has started is in its namespace and ends with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> tuple[int, float]:
        """Return the wait status and the seconds of processor time."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)
        return status, usage.ru_utime + usage.ru_stime


class _Bwrapped(Spawned):
    """A `bwrap`, which may end a moment before the first process of its namespace; that is then ours to reap."""

    def __init__(self, process: subprocess.Popen, info: int) -> None:
        super().__init__(process)
        self._info = info

    def wait(self) -> tuple[int, float]:
        """Return the wait status and the seconds of processor time; nothing in the namespace is alive any more."""
        status, seconds = super().wait()
        with open(self._info) as file:
            first = re.search(r'"child-pid": (\d+)', file.read())
        with contextlib.suppress(ChildProcessError):  # bwrap has reaped it
            _, _, usage = os.wait4(int(first[1]), 0) if first else (0, 0, None)
            seconds += usage.ru_utime + usage.ru_stime if usage else 0.0
        return status, seconds


def memory_file(content: bytes) -> int:
    """Return a descriptor of an unnamed file in memory, at its beginning."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _compiled_guest(python: str) -> bytes:
    here = Path(__file__).parent / "guest"
    sources = {f"{GUEST}/{path.name}": path.read_text() for path in here.glob("*.py")}
    for depth in range(1, GUEST.count("/") + 1):  # our own `__init__` files load too much
        sources["/".join(GUEST.split("/")[:depth]) + "/__init__.py"] = ""
    command = [python, "-I", "-S", "-c", COMPILE]
    done = subprocess.run(command, input=json.dumps(sources).encode(), capture_output=True, env={}, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{python} cannot compile for it: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return done.stdout
