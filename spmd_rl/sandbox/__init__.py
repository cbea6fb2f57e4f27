"""The sandbox, in which code from answers runs. It can reach neither the host nor the verdict on itself.

    sandbox = open_sandbox("auto", "reward.code.sandbox")
    sandbox.run("print(input())", "hello").stdout

`base` runs jobs in confined processes, which the process of `served` and `server` forks. Confinement: `forkserver` by
user id, empty root, Landlock and seccomp (needs root); `bwrap` by namespaces, inside bubblewrap; `unconfined` none
(`sandbox=none`). `guest/` is the code of confined processes.
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
