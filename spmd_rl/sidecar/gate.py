"""The gate of a host with keys: libzmq asks about each new connection (ZAP, ZeroMQ RFC 27), only listed keys pass.

Part of the host's loop, so that it needs no thread. Leaves out the proof that a peer has the key that it names, which
CURVE has had by then.
"""

import selectors

import zmq

from spmd_rl.curve_keys import ZAP_DOMAIN, HostKeys

ENDPOINT = "inproc://zeromq.zap.01"


class Gate:
    """Open it before the sockets that it guards. `refused` counts those who came with another key."""

    def __init__(self, context: zmq.Context, keys: HostKeys, selector: selectors.BaseSelector) -> None:
        self.refused = 0
        self._allowed = keys.allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        selector.register(self._socket.FD, selectors.EVENT_READ, (self, None))

    def heed(self, _: None, now: float) -> None:
        """Answer all questions: the descriptor tells of changes only."""
        while True:
            try:
                version, id_, domain, _address, _identity, mechanism, *credentials = self._socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(credentials) == 1
            name = self._allowed.get(credentials[0]) if known else None
            self.refused += name is None
            code, text = (b"400", b"not listed") if name is None else (b"200", b"OK")
            self._socket.send_multipart([version, id_, code, text, (name or "").encode(), b""])
