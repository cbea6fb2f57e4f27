"""Makes the CURVE keys with which ranks reach sidecar hosts beyond one machine. Torch-free.

    python -m spmd_rl sidecar_keys DIR                  keys of the hosts and the ranks: sidecar.keys=DIR
    python -m spmd_rl sidecar_keys DIR --node desk      one more pair, in DIR/desk, such as for a status from there

Existing keys are kept, and only the owner can read them. `DIR/allowed` lists the public keys that are served; remove a
line to revoke one. Hosts read it when they start. `spmd_rl/base/curve_keys.py` describes the files.
"""

import os
import re
import sys
from pathlib import Path

import zmq

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.curve_keys import ALLOWED, CLIENT_SECRET, SERVER_PUBLIC, SERVER_SECRET, ClientKeys, HostKeys
from spmd_rl.base.errors import UserError, tell


def make(directory: Path, node: str | None = None) -> Path:
    """Make the missing keys of a directory, and of `node`; return the value for `sidecar.keys` or `--keys`.

    UserError for an invalid name, a directory of another owner, and files that are no keys.
    """
    if node is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", node):
        raise UserError(f"--node: {node!r} must be a name of letters, digits, dots and dashes")
    _own(directory)
    server = directory / SERVER_SECRET
    if not server.exists():
        public, secret = zmq.curve_keypair()
        _write(directory / SERVER_PUBLIC, public)
        _write(server, secret)
    _add_client(directory, directory, "ranks")
    place = directory
    if node is not None:
        place = directory / node
        _own(place)
        if not (place / SERVER_PUBLIC).exists():
            _write(place / SERVER_PUBLIC, (directory / SERVER_PUBLIC).read_bytes().strip())
        _add_client(directory, place, node)
    HostKeys.load(directory, "keys")
    ClientKeys.load(place, "keys")
    return place


def _add_client(directory: Path, place: Path, name: str) -> None:
    if not (place / CLIENT_SECRET).exists():
        public, secret = zmq.curve_keypair()
        _write(place / CLIENT_SECRET, secret)
        _write(directory / ALLOWED, public + b" " + name.encode(), os.O_APPEND)


def _own(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.geteuid() or path.stat().st_mode & 0o077:
        raise UserError(f"keys: {path} must be a directory of your own with mode 0700")


def _write(path: Path, line: bytes, how: int = os.O_EXCL) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb") as file:
        file.write(line + b"\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for a user's mistake."""
    parser = Parser(program("sidecar_keys"), description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--node", metavar="NAME", help="make one more pair, for a client elsewhere")
    asked = parser.parse_args(argv)
    try:
        place = make(asked.directory, asked.node)
    except UserError as error:
        tell(f"error: {error}")
        return 2
    if asked.node:
        print(f"copy {place} to {asked.node}: python -m spmd_rl sidecar --status tcp://HOST:PORT --keys {place.name}")
    else:
        print(f"sidecar.keys={place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
