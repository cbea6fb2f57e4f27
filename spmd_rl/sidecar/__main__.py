"""The sidecar host as a process of its own, started by local rank 0 of a node (see `launcher.py`).

Leaves out everything but the start. It is not meant to be typed:

    python -m spmd_rl.sidecar <fd of a socket to the rank>
"""

import signal
import socket
import sys

from spmd_rl import wire
from spmd_rl.errors import UserError
from spmd_rl.process import die_with_parent
from spmd_rl.sidecar.channel import receive, send
from spmd_rl.sidecar.host import Host


def main(fd: int) -> None:
    """Be the host until the rank is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    with socket.socket(fileno=fd) as parent:
        start = receive(parent, wire.STARTING_HOST)
        if start is None:
            return
        if start.parent:
            die_with_parent(start.parent)
        try:
            host = Host(start, parent)
        except UserError as error:
            send(parent, wire.Failed(str(error)))
            return
        host.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
