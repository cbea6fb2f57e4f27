"""Authentication of connections to a host with keys: libzmq asks about each one (ZAP, ZeroMQ RFC 27).

CURVE has proved by then that the peer holds the key that it names; whether the key is listed is decided here. The
authenticator runs in the host's event loop, so that it needs no thread.
"""

import zmq

from spmd_rl.curve_keys import ZAP_DOMAIN, HostKeys
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.sockets import received

ENDPOINT = "inproc://zeromq.zap.01"


class Authenticator:
    """Lets in the keys of `HostKeys.allowed`. Create it before the sockets that it guards."""

    def __init__(self, context: zmq.Context, keys: HostKeys, loop: EventLoop) -> None:
        self.refused = 0
        """The number of connections that came with a key that is not listed."""
        self._allowed = keys.allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        loop.watch(self._socket, self._answer)

    def _answer(self) -> None:
        for version, id_, domain, _address, _identity, mechanism, *credentials in received(self._socket):
            checked = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(credentials) == 1
            name = self._allowed.get(credentials[0]) if checked else None
            self.refused += name is None
            code, text = (b"400", b"not listed") if name is None else (b"200", b"OK")
            self._socket.send_multipart([version, id_, code, text, (name or "").encode(), b""])
