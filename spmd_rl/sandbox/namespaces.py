"""A server whose children are confined by namespaces of their own. It lives inside bubblewrap.

It is the first process of bubblewrap's namespaces and has all capabilities there, which count for nothing outside. For
each job it forks the first process of another pid namespace, which mounts the job's own file system, forks the job and
waits for it. The job loses all capabilities before it runs. When that first process dies, the kernel kills and reaps
all others of its namespace before it reports the death: a kill leaves nothing behind, at whatever moment.
"""

import os
import socket

from spmd_rl.sandbox import confine
from spmd_rl.sandbox.server import Child, Server, confine_and_work, confined, take_descriptors

BOX = "/box0"
"""The working directory of a job. What another job has there cannot be seen."""


class NamespaceServer(Server):
    """Gives each child a pid namespace, in which all that it starts ends with it, and a file system in memory."""

    def __init__(self, orders: socket.socket) -> None:
        super().__init__(orders)
        confine.mount_root()
        self._me = os.pidfd_open(os.getpid())

    def fork(self, child: Child, fds: list[int]) -> int:
        """Start a job, as `Server.fork` says."""
        child.status_fd, theirs = os.pipe()
        try:
            confine.call("unshare", confine.NEW_PID)  # of the next child
            if (pid := os.fork()) == 0:
                confined(_be_first, child, [*fds, theirs])
        finally:
            os.close(theirs)
            confine.call("setns", self._me, confine.NEW_PID)  # one can only unshare from one's own
        return pid


def _be_first(child: Child, fds: list[int]) -> None:
    """Start the job, wait for it and write its wait status to the last of `fds`."""
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
