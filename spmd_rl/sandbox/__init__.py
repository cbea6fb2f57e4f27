"""The sandbox: the place where code from answers runs. Nothing that it does reaches the host or the verdict on itself.

| module | what it is |
|---|---|
| `base` | starts jobs in confined processes, at most two at a time, and reports how they ended |
| `served`, `server` | owns a process that forks the confined ones; its loop |
| `forkserver`, `forkserver_main` | confinement by user id, empty root, Landlock and seccomp; needs root; its process |
| `bwrap`, `namespaces` | the same process inside bubblewrap, confinement by namespaces |
| `unconfined` | the same process without confinement, for those who ask for it |
| `confine` | the system calls |
| `packages` | the installed packages that code may import |
| `guest/` | what runs inside: a program, or tested code, or its tests |

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
"""Root takes the fork server: it is as strict, and needs no user namespaces, in which the kernel has had most bugs."""


def open_sandbox(name: str, key: str, packages: Sequence[str] = ()) -> BaseSandbox:
    """Open the sandbox of that name, or for `auto` the first that works here, and run a program in it.

    `packages`: what code may import beside the standard library. UserError, which names the setting `key`, if there is
    none: nothing runs unconfined unless `none` was asked for.
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
