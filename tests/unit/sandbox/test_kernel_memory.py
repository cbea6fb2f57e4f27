"""Programs that take the kernel's memory, which no limit of a process counts: they get no more than a few MB of it."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.sandbox.conftest import TIGHT
from tests.unit.sandbox.test_hostile import refused

MOST_MB = 64
TRIES = 3
"""Other programs of this machine take memory meanwhile: the least growth of several tries counts."""
ENDLESS = """
n, kept = 0, []
try:
    while time.process_time() < {seconds}:
        {step}
        n += 1
except (OSError, RuntimeError) as error:
    print(error, file=sys.stderr)
time.sleep(0.2)
print(n)
"""
FILL = """
        for s in kept[-1]:
            s.setblocking(False)
            with contextlib.suppress(OSError):
                while True: s.send(bytes({size}))
"""
STEPS = {
    "stream sockets": "kept.append(socket.socketpair())" + FILL.format(size=60_000),
    "datagrams": "kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))" + FILL.format(size=100_000),
    "empty datagrams": "kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))" + FILL.format(size=1),
    "pipes": "kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)\n        with contextlib.suppress(OSError):\n"
    "            while True: os.write(kept[-1][1], bytes(1 << 16))",
    "symbolic links": "os.symlink('x' * 4000, f'{n:0250d}')",
    "short symbolic links": "os.symlink('x' * 100, f'{n:0250d}')",
    "hard links": "n or open('a', 'w').close(); os.link('a', f'{n:0250d}')",
    "directories": "os.mkdir('d' * 250); os.chdir('d' * 250)",
    "files": "open(f'{n:0250d}', 'w').close()",
    "unlinked files": "kept.append(open('a', 'w')); os.unlink('a')",
    "names that are not there": "os.path.exists(f'/usr/{n:0250d}') or os.path.exists(f'{n:0250d}')",
    "renamed files": "n or open('0' * 250, 'w').close(); os.rename(f'{n:0250d}', f'{n + 1:0250d}')",
    "shared mappings": "kept.append(mmap.mmap(-1, 4096))",
    "mappings": "kept.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON, prot=1 + n % 2 * 2))",
    "threads": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "signals": "n or signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65)); os.kill(os.getpid(), 34 + n % 30)",
    "epoll": "kept.append(select.epoll()); [kept[i % len(kept)].register(os.dup(0)) for i in range(n)]",
    "events": "kept.append(os.dup(libc.eventfd(0, 0)))",
}
IMPORTS = (
    "import contextlib, ctypes, mmap, os, select, signal, socket, sys, threading, time\nlibc = ctypes.CDLL(None)\n"
)


def kernel_mb() -> float:
    """What the kernel has for itself, and the buffers of sockets and pipes."""
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    taken = sum(int(found[name].split()[0]) for name in ("Slab", "KernelStack", "PageTables", "Shmem"))
    buffers = [line.split()[-1] for line in Path("/proc/net/sockstat").read_text().splitlines() if " mem " in line]
    return taken / 1024 + sum(map(int, buffers)) * 4096 / 2**20


def growth(sandbox, program: str, limits) -> float:
    """The most that the kernel takes while a program runs, beside what it had before."""
    before, most, done = kernel_mb(), [0.0], threading.Event()

    def watch():
        while not done.wait(0.01):
            most[0] = max(most[0], kernel_mb() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = sandbox.run(program, limits=limits)
    finally:
        done.set()
        watcher.join()
    assert result.end == "wall" or (result.end == "exit" and result.stdout.strip().isdigit()), result
    return most[0]


@pytest.mark.parametrize("name", STEPS)
def test_the_kernel_gives_little(sandbox, name):
    program = IMPORTS + ENDLESS.format(step=STEPS[name], seconds=0.5)
    limits = replace(TIGHT, cpu_seconds=4, memory_bytes=512 << 20)
    found = []
    while not found or (found[-1] > MOST_MB and len(found) < TRIES):
        found.append(growth(sandbox, program, limits))
    assert min(found) <= MOST_MB + TIGHT.disk_bytes / 2**20, found


@pytest.mark.mounts
def test_what_makes_the_kernel_keep_more_is_refused(sandbox):
    program = """
import array, fcntl, mmap, socket
a, b = socket.socketpair()
file = open("/dev/null")
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    attempt("buffer", lambda: a.setsockopt(socket.SOL_SOCKET, option, 1 << 22))
for option in (socket.SO_PEERCRED, 77, socket.SO_SNDBUF):
    attempt("peer", lambda: a.getsockopt(socket.SOL_SOCKET, option))
attempt("in flight", lambda: socket.send_fds(a, [b"x"], [0]))
attempt("message", lambda: a.sendmsg([b"x"]))
r, w = os.pipe()
attempt("pipe", lambda: fcntl.fcntl(w, 1031, 1 << 20))
attempt("lock", lambda: fcntl.lockf(w, fcntl.LOCK_EX, 1, 5))
attempt("lease", lambda: fcntl.fcntl(r, 1024, 0))
attempt("shared", lambda: mmap.mmap(-1, 4096))
"""
    if sandbox.name == "forkserver-unmounted":
        program = program.replace('file = open("/dev/null")', "")
    refused(sandbox, program, 13)


def test_what_python_needs_of_them_is_there(sandbox):
    program = """
import asyncio, fcntl, mmap, os, socket, threading
a, b = socket.socketpair()
socket.socket(fileno=os.dup(a.fileno())).sendall(b"x")
assert b.recv(9) == b"x" and a.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
assert mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)[0] == 0
assert mmap.mmap(0, 0, prot=mmap.PROT_READ)[:] == b"5 6"
r, w = os.pipe()
assert fcntl.fcntl(r, fcntl.F_GETFL) == os.O_RDONLY and os.get_inheritable(r) is False
async def main():
    reader, writer = await asyncio.to_thread(os.pipe)
    return await asyncio.get_running_loop().run_in_executor(None, lambda: 7)
print(asyncio.run(main()))
"""
    result = sandbox.run(program, "5 6", TIGHT)
    assert result.stdout == "7\n", result
    program = "import pathlib, sqlite3\nfor name in (':memory:', 'a b.db', pathlib.Path('c?d.db')):\n"
    program += (
        "    with sqlite3.connect(name) as c: print(c.execute('create table t(x)').execute('select 5').fetchone()[0])"
    )
    assert sandbox.run(program, limits=TIGHT).stdout == "5\n5\n5\n"
