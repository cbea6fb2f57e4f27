"""A pool's zygote: imports the rewarder's module once, then forks a worker whenever the host passes it a socket.

So a worker that was killed is replaced in milliseconds, however slow the import. The rewarder itself is built in each
worker, after the fork: no connection, thread or random state is shared. Ends when the host hangs up.

    python -m spmd_rl.sidecar.zygote <fd of a socket to the host>
"""

import contextlib
import gc
import os
import signal
import socket
import sys

from spmd_rl import wire
from spmd_rl.errors import UserError
from spmd_rl.process import die_with_parent
from spmd_rl.sidecar.channel import receive
from spmd_rl.sidecar.worker import serve
from spmd_rl.targets import import_target


def main(fd: int) -> None:
    """Import, then fork on demand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with socket.socket(fileno=fd) as host:
        warm = receive(host, wire.TO_ZYGOTE)
        if warm is None:
            return
        die_with_parent(warm.parent)
        if warm.pool.cpus:
            os.sched_setaffinity(0, warm.pool.cpus)
        with contextlib.suppress(UserError):  # the worker will say so
            import_target(warm.domain, warm.pool.target)
        gc.freeze()  # keep shared pages shared
        me = os.getpid()
        while True:
            order, fds, _, _ = socket.recv_fds(host, 1, 1)
            if not order:
                return
            if os.fork() == 0:
                _child(host, fds[0], me, warm)
            os.close(fds[0])


def _child(host: socket.socket, fd: int, parent: int, warm: wire.Warm) -> None:
    """Run a worker and never return: what the zygote's stack would clean up is not ours."""
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        host.close()
        with socket.socket(fileno=fd) as sock:
            serve(sock, warm.domain, warm.pool)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        pass  # the host hung up first
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
