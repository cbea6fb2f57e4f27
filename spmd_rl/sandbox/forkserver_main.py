"""The process of the fork server: an interpreter with the standard library loaded, which forks a child for each job.

Before the first fork it keeps the sources of the standard library in memory and changes its root to an empty directory.
A child then gets a separate user id, hard limits, Landlock and a seccomp filter. This process stays root; it kills and
reaps all that a child leaves behind. It ends when its socket closes, after its children.

Where mounting is allowed, the root is a file system in memory with room for a child's files and `/dev/null`; elsewhere
it is a removed directory, and a child cannot write files.
"""

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import socket
import sqlite3
import sys
import sysconfig
import tempfile
import time
import urllib.parse
import zoneinfo
from collections.abc import Callable
from pathlib import Path

from spmd_rl.base.process import die_with_parent
from spmd_rl.sandbox import confine
from spmd_rl.sandbox.guest import suite
from spmd_rl.sandbox.namespaces import NamespaceServer  # noqa: F401 - for `start`
from spmd_rl.sandbox.server import Child, PlainServer, Server, confine_and_work, confined, take_descriptors  # noqa: F401

MODULES = """
abc argparse array ast asyncio base64 binascii bisect calendar cmath codecs collections collections.abc contextlib copy
csv dataclasses datetime decimal difflib enum fractions functools gc hashlib heapq html inspect io itertools json
keyword locale logging math numbers operator os pathlib pprint queue random re secrets shutil signal statistics string
struct subprocess tempfile textwrap threading time timeit traceback types typing unicodedata unittest unittest.mock uuid
warnings weakref zlib
"""
"""Loaded before the first fork, as are all extension modules; others are loaded on demand."""
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "__pycache__"}
NEVER = ("_test", "_tkinter", "_curses", "_xx", "xx", "readline", "_gdbm", "_dbm", "nis", "oss")


class SourceImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Importer of a directory's Python modules from memory, as a child cannot open files."""

    def __init__(self, directory: Path) -> None:
        self._sources: dict[str, tuple[bytes, bool]] = {}
        for folder, below, files in os.walk(directory, followlinks=True):
            below[:] = [name for name in below if name not in SKIPPED]
            for path in (Path(folder, file) for file in files if file.endswith(".py")):
                parts = path.relative_to(directory).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                # a file may be a broken link
                with contextlib.suppress(OSError):
                    self._sources[".".join(parts[:-1] if is_package else parts)] = path.read_bytes(), is_package

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        """Return the spec of a module below the directory, else None."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._sources else None

    def is_package(self, fullname: str) -> bool:
        """Return True if the module is a package."""
        return self._sources[fullname][1]

    def get_source(self, fullname: str) -> str:
        """Return the module's source code as text."""
        return importlib.util.decode_source(self._sources[fullname][0])


def preload() -> None:
    """Import the modules that children use; serve later imports from memory."""
    names = MODULES.split()
    if dynload := sysconfig.get_config_var("DESTSHARED"):
        with contextlib.suppress(OSError):
            names += sorted({name.split(".")[0] for name in os.listdir(dynload)})
    for name in names:
        if not name.startswith(NEVER):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    sqlite3.connect = sqlite3.dbapi2.connect = functools.partial(connect_without_locks, sqlite3.connect)
    sources = SourceImporter(Path(sysconfig.get_path("stdlib")))
    sys.meta_path[:] = [*sys.meta_path[:2], sources]
    # a child cannot read the files of zones, but `ZoneInfo` returns objects that are alive
    zones = {name: zoneinfo.ZoneInfo(name) for name in zoneinfo.available_timezones()}
    zoneinfo.available_timezones = lambda: set(zones)


def connect_without_locks(connect: Callable, database: object, *args: object, **options: object) -> object:
    """Open an SQLite database without locks, which children may not use."""
    if not options.get("uri") and isinstance(database, (str, os.PathLike)) and str(database) not in ("", ":memory:"):
        database, options["uri"] = f"file:{urllib.parse.quote(os.fspath(database))}?nolock=1", True
    return connect(database, *args, **options)


def load_packages(folder: Path) -> None:
    """Import a folder's packages with all their extension modules: a child cannot load a library from a file.

    Later imports come from memory alone.
    """
    finder = importlib.machinery.PathFinder
    sys.path[:] = [str(folder)]
    sys.meta_path.insert(2, finder)
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    names = [name for name in os.listdir(folder) if name.isidentifier()]
    # pytest uses most of its plug-ins
    names += [f"_pytest.{path.stem}" for path in (folder / "_pytest").glob("*.py")]
    for top, _, files in os.walk(folder, followlinks=True):
        parts = Path(top).relative_to(folder).parts
        if not SKIPPED.intersection(parts):
            names += [".".join((*parts, file.partition(".")[0])) for file in files if file.endswith(suffixes)]
    for name in names:
        with contextlib.suppress(ImportError, AttributeError, OSError):
            importlib.import_module(name)
    sys.meta_path[2:] = [*sys.meta_path[3:], SourceImporter(folder)]
    sys.path[:] = []
    sys.path_importer_cache.clear()


def hide_files(mounts: bool) -> bool:
    """Change to an empty root; return True if children can have files. OSError if not allowed."""
    if mounts:
        with contextlib.suppress(OSError):
            confine.mount_root()
            return True
    directory = tempfile.mkdtemp(prefix="spmd-box-")
    os.chmod(directory, 0o755)
    os.chdir(directory)
    os.rmdir(directory)
    os.chroot(".")
    return False


class UserIdServer(Server):
    """A server that confines each child, and what it leaves behind, by an unused user id."""

    def __init__(self, orders: socket.socket, first_uid: int, mounts: bool) -> None:
        """Hide all files. OSError where the server cannot work."""
        super().__init__(orders)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        confine.call("prctl", confine.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._first_uid = first_uid
        self._files = hide_files(mounts)

    def fork(self, child: Child, fds: list[int]) -> int:
        """Start a job under its slot's user id."""
        directory = self._prepare_directory(child.slot, child.disk_bytes)
        me = os.getpid()
        if (pid := os.fork()) == 0:
            confined(_become_child, child, fds, self._first_uid + child.slot, directory, me)
        return pid

    def end_others(self, child: Child) -> None:
        """Kill and reap all processes of the child's user id."""
        while child.may_fork and self._any_process(uid := self._first_uid + child.slot):
            _kill_all_of(uid)
            time.sleep(0.001)
            self._reap()

    def _prepare_directory(self, slot: int, num_bytes: int) -> str:
        if not self._files:
            return ""
        directory = f"/box{slot}"
        with contextlib.suppress(OSError):
            confine.call("umount2", directory.encode(), confine.MNT_DETACH)
        confine.mount_tmpfs(directory, max(num_bytes, 4096), 0o777)
        return directory

    def _any_process(self, uid: int) -> bool:
        # a process may end during the search: then the caller searches again
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(self._proc) if name.isdigit()]
            return any(os.stat(name, dir_fd=self._proc).st_uid == uid for name in names)
        return True

    def _reap(self) -> None:
        pids = {child.pid for child in self.running}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] in pids:
                    self.ended[ended[0]] = ended


def _kill_all_of(uid: int) -> None:
    # In one system call, so that none can escape by forking.
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _become_child(child: Child, fds: list[int], uid: int, directory: str, parent: int) -> None:
    def give_up() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        die_with_parent(parent)

    take_descriptors(fds)
    confine_and_work(directory, child.may_fork, give_up)


def start(fd: int, packages: str, kind: Callable[..., Server], *args: object) -> None:
    """Run a server on a socket. It sends `ready`, or the reason why it cannot work.

    `packages`: a folder with all that children may import, including pytest. `kind(orders, *args)` returns the server.
    """
    # Ctrl-C is for the ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as orders:
        preload()
        load_packages(Path(packages))
        suite.prepare()
        try:
            server = kind(orders, *args)
        except OSError as error:
            orders.send(str(error).encode())
            return
        # the collector would write to pages that children share
        gc.freeze()
        orders.send(b"ready")
        server.run()
