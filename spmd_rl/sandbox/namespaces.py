"""A server that confines each child by separate namespaces. It runs inside bubblewrap.

It is the first process of bubblewrap's namespaces and has all capabilities there, which have no effect outside. For
each job it forks the first process of another pid namespace, which mounts a file system, forks the job and waits for
it. The job loses all capabilities. When that first process dies, the kernel kills and reaps all others of its namespace
before it reports the death.
"""

import os
import socket

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.server import Child, Server, confine_and_work, confined, take_descriptors

BOX = "/box0"


class NamespaceServer(Server):
    """A server that gives each child a pid namespace, in which all processes end with it, and a file system."""

    def __init__(self, orders: socket.socket) -> None:
        super().__init__(orders)
        confine.mount_root()
        self._me = os.pidfd_open(os.getpid())

    def fork(self, child: Child, fds: list[int]) -> int:
        """Start a job below the first process of a new pid namespace."""
        child.status_fd, theirs = os.pipe()
        try:
            confine.call("unshare", confine.NEW_PID)  # of the next child
            if (pid := os.fork()) == 0:
                confined(_be_first, child, [*fds, theirs])
        finally:
            os.close(theirs)
            # a process can only unshare from its first namespace
            confine.call("setns", self._me, confine.NEW_PID)
        return pid


def _be_first(child: Child, fds: list[int]) -> None:
    take_descriptors(fds)
    status_fd = len(fds) - 1
    confine.call("unshare", confine.NEW_NS)
    confine.mount_tmpfs(BOX, max(child.disk_bytes, 4096), 0o700)
    if (job := os.fork()) == 0:
        os.close(status_fd)
        confined(confine_and_work, BOX, child.may_fork, confine.drop_capabilities)
    os.closerange(0, status_fd)
    ended = status = 0
    while ended != job:
        ended, status = os.wait()
    os.write(status_fd, b"%d" % status)
    os._exit(0)
