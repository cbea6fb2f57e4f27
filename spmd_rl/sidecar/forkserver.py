"""The fork server of a pool: imports the target's module once, then forks a worker for each socket that it receives.

    python -m spmd_rl.sidecar.forkserver <fd of a socket to the host>

A killed worker is replaced in milliseconds, even if the import is slow. Each worker builds its rewarder or environment
after the fork: no connection, thread or random state is shared. This command is the fork server's keeper, without user
code: it forks the fork server, adopts processes that this leaves behind, and kills them when the host is gone.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys

from spmd_rl.base.errors import UserError
from spmd_rl.base.process import adopt_orphans, die_with_parent, kill_children
from spmd_rl.base.targets import import_target
from spmd_rl.sidecar import env_worker, wire, worker
from spmd_rl.sidecar.frames import receive_frame


def main(fd: int) -> None:
    """Keep a fork server until the host is gone; end all its processes."""
    # Ctrl-C reaches the whole process group, but is for the ranks, which end this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel then reaps ended children itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    adopt_orphans()
    keeper = os.getpid()
    if (server := os.fork()) == 0:
        serve_forks(fd, keeper)
        return
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP | select.POLLHUP)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        poller.register(os.pidfd_open(server), select.POLLIN)
        poller.poll()
    kill_children()


def serve_forks(fd: int, keeper: int) -> None:
    """Import the target, then fork a worker on demand until the host is gone."""
    die_with_parent(keeper)
    with socket.socket(fileno=fd) as host:
        start = receive_frame(host, wire.TO_CHILD)
        if start is None:
            return
        if start.pool.cpus:
            os.sched_setaffinity(0, start.pool.cpus)
        # The worker imports it again and reports the error.
        with contextlib.suppress(UserError):
            import_target(start.section, start.pool.target)
        # A collection in a worker would write to all objects, and so copy the pages that it shares with this process.
        gc.freeze()
        pid = os.getpid()
        while True:
            order, fds, _, _ = socket.recv_fds(host, 1, 1)
            if not order:
                return
            if os.fork() == 0:
                _run_worker(host, fds[0], pid, start)
            os.close(fds[0])


def _run_worker(host: socket.socket, fd: int, parent: int, start: wire.StartForkServer) -> None:
    """Run a worker in the forked child. Never returns: the parent's stack must not unwind here."""
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        host.close()
        with socket.socket(fileno=fd) as sock:
            serve = env_worker.serve if isinstance(start.pool, wire.EnvPoolSpec) else worker.serve
            serve(sock, start.section.partition(".")[2], start.pool)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        pass  # the host hung up first
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
