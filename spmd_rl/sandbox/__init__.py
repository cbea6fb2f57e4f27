"""The sandbox, in which code from answers runs. It can reach neither the host nor the verdict on itself.

| module | content |
|---|---|
| `base` | jobs in confined processes, at most two at a time |
| `served`, `server` | the owner of a process that forks the confined ones, and that process's loop |
| `forkserver`, `forkserver_main` | confinement by user id, empty root, Landlock and seccomp; needs root |
| `bwrap`, `namespaces` | confinement by namespaces, inside bubblewrap |
| `unconfined` | no confinement (`sandbox=none`) |
| `confine` | system calls |
| `packages` | installed packages that code may import |
| `guest/` | code of confined processes |

    sandbox = open_sandbox("auto", "reward.code.sandbox")
    sandbox.run("print(input())", "hello").stdout
"""

from collections.abc import Callable, Sequence

from spmd_rl.base.errors import UserError
from spmd_rl.sandbox.base import BaseSandbox
from spmd_rl.sandbox.bwrap import Bubblewrap
from spmd_rl.sandbox.forkserver import ForkServer
from spmd_rl.sandbox.packages import find_packages
from spmd_rl.sandbox.unconfined import Unconfined

SANDBOXES: dict[str, Callable[..., BaseSandbox]] = {"bwrap": Bubblewrap, "forkserver": ForkServer, "none": Unconfined}
AUTO = ("forkserver", "bwrap")
"""In order of preference: the fork server needs no user namespaces, in which the kernel had most bugs."""


def open_sandbox(name: str, key: str, packages: Sequence[str] = ()) -> BaseSandbox:
    """Open the sandbox of that name, or for `auto` the first that works here, and run a program in it.

    `packages`: what code may import besides the standard library. UserError with the setting `key` if it fails.
    """
    reasons = []
    try:
        given = {"packages": find_packages(packages)} if packages else {}
    except RuntimeError as error:
        raise UserError(f"{key.rpartition('.')[0]}.packages: {error}") from None
    for candidate in AUTO if name == "auto" else (name,):
        try:
            sandbox = SANDBOXES[candidate](**given)
            sandbox.prove(packages)
        except (OSError, RuntimeError) as error:
            reasons.append(f"{candidate}: {error}")
        else:
            return sandbox
    without = f"; {key}=none would run code from answers without any protection" if name == "auto" else ""
    raise UserError(f"{key}={name}: no sandbox works here ({'; '.join(reasons)}){without}")
