"""CURVE and the allow-list: who holds a listed key is served, and nobody else gets a byte."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
import zmq

from launch import sidecar_keys
from spmd_rl import sidecar
from spmd_rl.base import curve_keys
from spmd_rl.base.curve_keys import ClientKeys, HostKeys
from spmd_rl.base.errors import UserError
from spmd_rl.config.checks import check_sidecar
from spmd_rl.config.sections.run import SidecarConfig
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.sockets import send
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.types import AnswerInfo
from tests import sockets
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, free_address, host_of, numbers, private_node, prompt, rewards


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@pytest.fixture
def keys(tmp_path) -> Path:
    return sidecar_keys.make(tmp_path / "keys")


# -- the directory ----------------------------------------------------------------------------------------------------


def test_made_keys_are_for_their_owner_alone_and_are_kept(tmp_path):
    folder = tmp_path / "keys"
    assert sidecar_keys.main([str(folder)]) == 0
    assert sidecar_keys.main([str(folder), "--node", "cpu7"]) == 0
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    own = {"server.secret", "server.public", "client.secret", "allowed"}
    assert files == own | {"cpu7/server.public", "cpu7/client.secret"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert sidecar_keys.main([str(folder), "--node", "cpu7"]) == 0
    assert before == {path: path.read_bytes() for path in before}
    assert sorted(HostKeys.load(folder).allowed.values()) == ["cpu7", "ranks"]
    assert ClientKeys.load(folder).secret != ClientKeys.load(folder / "cpu7").secret


@pytest.mark.parametrize("name", ["..", "a/b", "", "-x"])
def test_a_node_is_named_not_pathed(tmp_path, name, capsys):
    assert sidecar_keys.main([str(tmp_path / "keys"), f"--node={name}"]) == 2
    assert "must be a name of letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda keys: (keys / "server.secret").chmod(0o644), r"server\.secret must be your own, with mode 0600"),
        (lambda keys: (keys / "allowed").chmod(0o620), r"allowed must be your own"),
        (lambda keys: (keys / "allowed").write_text("\n# nobody\n"), "lists no key"),
        (lambda keys: (keys / "allowed").write_text("short ranks\n"), r"allowed:1 is not a CURVE key"),
        (lambda keys: (keys / "server.secret").write_bytes(b"\xff" * 40), "no text"),
        (lambda keys: (keys / "server.secret").write_text("\\" * 40), "is not a CURVE key"),
        (lambda keys: (keys / "server.secret").unlink(), "No such file.*spmd_rl sidecar_keys"),
        (lambda keys: (keys / "client.secret").chmod(0o640), r"client\.secret must be your own"),
    ],
    ids=range(8),
)
def test_keys_that_are_none_end_the_run_before_torch(keys, spoil, line):
    settings = SidecarConfig("tcp://*:5555", str(keys))
    check_sidecar(settings, debug=False)
    spoil(keys)
    with pytest.raises(UserError, match=r"^sidecar\.keys: .*" + line) as error:
        check_sidecar(settings, debug=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "tcp://*:5555", "tcp://[::]:5555"])
def test_beyond_this_machine_only_with_keys(bind):
    with pytest.raises(UserError, match=r"^bind: .*sidecar\.keys.*spmd_rl sidecar_keys"):
        SidecarConfig(bind)
    assert SidecarConfig(bind, "~/keys").keys == str(Path.home() / "keys")


@pytest.mark.parametrize(
    "bind", ["tcp://host:5555", "tcp://eth0:5555", "udp://*:1", "tcp://127.0.0.1:99999", "tcp://*", ""]
)
def test_addresses_that_nobody_can_listen_at(bind):
    with pytest.raises(UserError, match="^bind: "):
        SidecarConfig(bind, "keys")


def test_loopback_is_this_machine():
    loopback = ("tcp://127.0.0.1:1", "tcp://127.8.0.1:1", "tcp://[::1]:1")
    assert all(curve_keys.on_loopback(address) for address in loopback)
    assert not any(
        curve_keys.on_loopback(a) for a in ("tcp://*:1", "tcp://[::]:1", "tcp://127.0.0.1.evil:1", "tcp://1.2.3.4:1")
    )
    binds = ("tcp://*:1", "tcp://0.0.0.0:12", "tcp://[::]:1", "tcp://10.0.0.1:1")
    assert [curve_keys.local_address(bind) for bind in binds] == [
        "tcp://127.0.0.1:1", "tcp://127.0.0.1:12", "tcp://[::1]:1", "tcp://10.0.0.1:1",
    ]  # fmt: skip


# -- at the gate ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(address: str, keys: ClientKeys | None):
    """A DEALER that asks for what any client may ask for."""
    question = wire.pack(wire.ScoreInput(prompt(), "a", AnswerInfo(1, "stop")))
    with sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        if keys is not None:
            keys.secure(dealer)
        dealer.connect(address)
        for message in (wire.Ping(), wire.ScoreRequests([wire.ScoreRequest(0, "toy", 1.0, question)])):
            send(dealer, message)  # whom the host has refused already sends nothing
        yield dealer


@pytest.mark.parametrize("bind", ["ipc", "tcp"])
def test_only_listed_keys_are_served(node, keys, bind):
    bind = bind if bind == "ipc" else free_address()
    address = node.address if bind == "ipc" else bind
    mine = ClientKeys.load(keys)
    other = zmq.curve_keypair()
    with sidecar.connect(rewards("Number"), node, bind=bind, keys=str(keys)) as scorer:
        host = host_of(scorer)
        assert asyncio.run(ask(scorer, ["a", "b"])) == numbers(["a", "b"])
        before = host.memory_info().rss
        with (
            stranger(address, None) as without,
            stranger(address, ClientKeys(mine.server, other[1])) as unlisted,
            stranger(address, ClientKeys(other[0], mine.secret)) as deceived,
            stranger(address, mine) as listed,
        ):
            assert listed.poll(5000) and isinstance(wire.TO_CLIENT.decode(listed.recv()), wire.Pong | wire.ScoreReplies)
            assert not any(dealer.poll(200) for dealer in (without, unlisted, deceived))
        assert fetch_status(address, mine).refused_keys > 0
        assert asyncio.run(ask(scorer, ["c"])) == numbers(["c"])
        assert host_of(scorer) == host and host.memory_info().rss - before < 16 << 20


def test_connections_that_prove_nothing_cost_nothing(node, keys, monkeypatch):
    """Hundreds that are silent, or talk something else, and a flood from one without a key."""
    bind = free_address()
    port = int(bind.rpartition(":")[2])
    with sidecar.connect(rewards("Number"), node, bind=bind, keys=str(keys)) as scorer, contextlib.ExitStack() as stack:
        host = host_of(scorer)
        before, files = host.memory_info().rss, host.num_fds()
        for i in range(200):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            if i % 2:
                raw.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f" + b"garbage" * 1000)
        with stranger(bind, None) as flood:
            for _ in range(1000):
                with contextlib.suppress(zmq.Again):
                    flood.send(bytes(1 << 16), zmq.NOBLOCK)
            assert asyncio.run(ask(scorer, ["a", "b"])) == numbers(["a", "b"])
        deadline = time.monotonic() + curve_keys.HANDSHAKE_MS / 1000 + patient(5)
        while host.num_fds() > files + 5 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert host.num_fds() <= files + 5
        assert host_of(scorer) == host and host.memory_info().rss - before < 32 << 20


def test_a_key_that_is_struck_off_is_refused_by_the_next_host(node, keys):
    sidecar_keys.make(keys, "cpu7")
    other = ClientKeys.load(keys / "cpu7")
    bind = free_address()
    with sidecar.connect(rewards("Number"), node, bind=bind, keys=str(keys)) as scorer:
        assert fetch_status(bind, other).pools["toy"].ready == 1
        lines = (keys / "allowed").read_text().splitlines()
        (keys / "allowed").write_text("\n".join(line for line in lines if not line.endswith("cpu7")) + "\n")
        host = host_of(scorer)
        host.terminate()
        host.wait(5)
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
        with pytest.raises(UserError, match="does not list this key"):
            fetch_status(bind, other, seconds=0.5)


def test_a_rank_without_the_hosts_key_is_told_at_the_start(node, keys):
    (keys / "client.secret").unlink()
    with pytest.raises(UserError, match=r"sidecar\.keys: .*client\.secret"):
        with sidecar.connect(rewards("Number"), node, keys=str(keys)):
            pass
