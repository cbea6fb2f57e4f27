"""The fork server: an interpreter that has loaded everything and forks a box whenever it is asked.

Before the first box it gives up its view of the files: it holds the sources of the standard library in memory and takes
an empty directory for its root. A box is then a child with a user id of its own, hard limits, Landlock and a seccomp
filter. This process, which stays root, kills and reaps what a box leaves behind and tells how it ended. It ends when
its socket closes, not by a parent-death signal: the boxes have to go first.

Where the kernel lets us mount, the root is a file system in memory, with room for the files of a box and `/dev/null`;
where not, it is a directory that has been removed, and a box can write no file at all.

    start(fd, first_uid, mounts)
"""

import array
import contextlib
import fcntl
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.process import die_with_parent
from spmd_rl.sandbox import confine
from spmd_rl.sandbox.guest import link, main, probe  # noqa: F401 - loaded before the fork

MODULES = """
abc argparse array ast asyncio base64 binascii bisect calendar cmath codecs collections collections.abc contextlib copy
csv dataclasses datetime decimal difflib enum fractions functools gc hashlib heapq html inspect io itertools json
keyword locale logging math numbers operator os pathlib pprint queue random re secrets shutil signal statistics string
struct subprocess tempfile textwrap threading time timeit traceback types typing unicodedata unittest unittest.mock uuid
warnings weakref zlib
"""
"""Loaded before the first fork, and all extension modules; the rest of the standard library when it is asked for."""
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "__pycache__"}
ROOT = "/proc"
"""Where the root is mounted, in a mount namespace of our own: a directory that is everywhere."""
FILTERS = {may_fork: confine.seccomp_program(may_fork, execute=False) for may_fork in (False, True)}
KEPT = 64
"""Descriptors from here on are out of the way of those that a box gets."""


class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the standard library's Python modules from memory, as no file can be opened in a box."""

    def __init__(self, directory: Path) -> None:
        self._sources: dict[str, tuple[bytes, bool]] = {}
        for path in directory.rglob("*.py"):
            parts = path.relative_to(directory).with_suffix("").parts
            if not SKIPPED.intersection(parts):
                is_package = parts[-1] == "__init__"
                self._sources[".".join(parts[:-1] if is_package else parts)] = path.read_bytes(), is_package

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        """As the import system calls it."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._sources else None

    def is_package(self, fullname: str) -> bool:
        """Whether it has modules of its own."""
        return self._sources[fullname][1]

    def get_source(self, fullname: str) -> str:
        """Its text."""
        return importlib.util.decode_source(self._sources[fullname][0])


def load() -> None:
    """Load what boxes use; from then on, import from memory alone."""
    names = MODULES.split()
    if dynload := sysconfig.get_config_var("DESTSHARED"):
        with contextlib.suppress(OSError):
            names += sorted({name.split(".")[0] for name in os.listdir(dynload)})
    for name in names:
        if not name.startswith(
            ("_test", "_tkinter", "_curses", "_xx", "xx", "readline", "_gdbm", "_dbm", "nis", "oss")
        ):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    sys.meta_path[:] = [*sys.meta_path[:2], Sources(Path(sysconfig.get_path("stdlib")))]
    sys.path[:] = []
    sys.path_importer_cache.clear()


def leave_the_files(mounts: bool) -> bool:
    """Take an empty root for this process and its children; whether boxes can have files. OSError if not allowed."""
    if mounts:
        with contextlib.suppress(OSError):
            confine.call("unshare", confine.NEW_NS | confine.NEW_NET | confine.NEW_IPC | confine.NEW_UTS)
            confine.call("mount", None, b"/", None, confine.MS_REC | confine.MS_PRIVATE, None)
            confine.mount_tmpfs(ROOT, 1 << 20, 0o755)
            for name in ("box0", "box1", "dev"):
                os.mkdir(f"{ROOT}/{name}")
            Path(f"{ROOT}/dev/null").touch()
            confine.call("mount", b"/dev/null", f"{ROOT}/dev/null".encode(), None, confine.MS_BIND, None)
            os.chroot(ROOT)
            os.chdir("/")
            return True
    directory = tempfile.mkdtemp(prefix="spmd-box-")
    os.chmod(directory, 0o755)
    os.chdir(directory)
    os.rmdir(directory)
    os.chroot(".")
    return False


class Server:
    """Forks a box for each order and tells how it ended, until the one who gives the orders is gone."""

    def __init__(self, orders: socket.socket, proc: int, first_uid: int, files: bool) -> None:
        """`proc`: a descriptor of `/proc`, as it is outside. `files`: whether boxes can have files."""
        self._orders = orders
        self._proc = proc
        self._first_uid = first_uid
        self._files = files
        self._running: set[_Box] = set()
        self._ended: dict[int, tuple] = {}  # by pid: what wait4 said, until it is told
        self._sizes: dict[int, int] = {}  # by slot: of the file system that is mounted there
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve until the socket closes."""
        while True:
            for key, _ in self._selector.select():
                if (box := key.data) is None:
                    if (box := self._begin()) is None:
                        for left in self._running:
                            self._end(left)
                        return
                    self._running.add(box)
                elif box in self._running:  # it has ended, or is to end
                    self._running.remove(box)
                    self._end(box)

    def _begin(self) -> "_Box | None":
        text, data, _, _ = self._orders.recvmsg(1 << 16, socket.CMSG_SPACE(7 * 4))
        if not text:
            return None
        fds = array.array("i")
        for _, _, part in data:
            fds.frombytes(part)
        control, *others = fds
        order = json.loads(text)
        box = _Box(socket.socket(fileno=control), order["slot"], order["processes"] > 1)
        with contextlib.suppress(OSError):  # no process to be had: the closing socket tells
            directory = self._room(box.slot, order["disk"])
            me = os.getpid()
            box.pid = os.fork()
            if box.pid == 0:
                _become_box(box, others, self._first_uid + box.slot, directory, me)
            box.pidfd = os.pidfd_open(box.pid)
            self._selector.register(box.pidfd, selectors.EVENT_READ, box)
        self._selector.register(box.control, selectors.EVENT_READ, box)
        for fd in others:
            os.close(fd)
        return box

    def _room(self, slot: int, num_bytes: int) -> str:
        """A box's directory, empty and of that size, or nothing where there can be no files."""
        if not self._files:
            return ""
        directory, size = f"/box{slot}", max(num_bytes, 4096)
        used = slot in self._sizes and os.listdir(directory)
        if used or self._sizes.get(slot, size) != size:
            confine.call("umount2", directory.encode(), confine.MNT_DETACH)
            del self._sizes[slot]
        if slot not in self._sizes:
            confine.mount_tmpfs(directory, size, 0o777)
            self._sizes[slot] = size
        return directory

    def _end(self, box: "_Box") -> None:
        """Kill and reap all that is left of a box, and tell how it ended."""
        self._selector.unregister(box.control)
        with box.control:
            if box.pidfd < 0:
                return
            self._selector.unregister(box.pidfd)
            os.close(box.pidfd)
            if box.pid not in self._ended:
                os.kill(box.pid, signal.SIGKILL)
                self._ended[box.pid] = os.wait4(box.pid, 0)
            while box.may_fork and self._anybody(uid := self._first_uid + box.slot):
                _kill_all_of(uid)
                time.sleep(0.001)
                self._reap()
            _, status, usage = self._ended.pop(box.pid)
            report = {"status": status, "cpu": usage.ru_utime + usage.ru_stime}
            with contextlib.suppress(OSError):
                box.control.send(json.dumps(report).encode())

    def _anybody(self, uid: int) -> bool:
        """Whether a process has that user id, dead ones included."""
        with contextlib.suppress(FileNotFoundError):  # one ends while we look: look again
            names = [name for name in os.listdir(self._proc) if name.isdigit()]
            return any(os.stat(name, dir_fd=self._proc).st_uid == uid for name in names)
        return True

    def _reap(self) -> None:
        """Reap what boxes have left to us; the other box is remembered, if it has just ended."""
        pids = {box.pid for box in self._running}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] in pids:
                    self._ended[ended[0]] = ended


@dataclass(eq=False)
class _Box:
    control: socket.socket
    slot: int
    may_fork: bool
    pid: int = 0
    pidfd: int = -1


def _kill_all_of(uid: int) -> None:
    """Kill whatever runs under a box's user id, at one stroke: no process can fork away from it."""
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _become_box(box: _Box, fds: list[int], uid: int, directory: str, parent: int) -> None:
    """Confine this process and do the job in it. Never returns."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, KEPT) for fd in fds]
        for i, fd in enumerate(kept):
            os.dup2(fd, i)
        os.closerange(len(kept), os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        os.chdir(directory or "/")
        os.umask(0o077)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        die_with_parent(parent)
        confine.call("prctl", confine.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        files = {"/": confine.READ, directory: confine.WRITE, "/dev/null": confine.WRITE} if directory else {}
        confine.landlock(files)
        confine.install_seccomp(FILTERS[box.may_fork])
        main.main(3, 4, 5)
    finally:
        os._exit(1)


def start(fd: int, first_uid: int, mounts: bool) -> None:
    """Be the fork server on a socket. Says `ready`, or why it cannot be one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    with socket.socket(fileno=fd) as orders:
        load()
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            confine.call("prctl", confine.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            files = leave_the_files(mounts)
        except OSError as error:
            orders.send(str(error).encode())
            return
        gc.freeze()  # keep shared pages shared
        orders.send(b"ready")
        Server(orders, proc, first_uid, files).run()
