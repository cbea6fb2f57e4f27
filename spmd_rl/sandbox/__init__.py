"""The sandbox: where code from answers runs. Nothing it does reaches the host, or the verdict on itself.

| | |
|---|---|
| `boxes` | runs jobs in boxes, two at a time, and says how they went |
| `forkserver`, `zygote` | a box by fork, user id, empty root, Landlock and seccomp; needs root |
| `bwrap` | a box by bubblewrap |
| `bare` | no box at all, for those who say so |
| `confine` | the system calls |
| `guest/` | what runs inside: the program, or the tested code, or its tests |

    sandbox = open_sandbox("auto", "reward.code.sandbox")
    sandbox.run("print(input())", "hello").stdout
"""

from collections.abc import Callable

from spmd_rl.errors import UserError
from spmd_rl.sandbox.bare import Bare
from spmd_rl.sandbox.boxes import Boxes
from spmd_rl.sandbox.bwrap import Bubblewrap
from spmd_rl.sandbox.forkserver import ForkServer

SANDBOXES: dict[str, Callable[[], Boxes]] = {"bwrap": Bubblewrap, "forkserver": ForkServer, "none": Bare}
AUTO = ("bwrap", "forkserver")


def open_sandbox(name: str, key: str) -> Boxes:
    """The sandbox of that name, or the first that works here if it is `auto`; a program has been run in it.

    UserError that names the setting `key` if there is none: nothing runs unprotected unless `none` was asked for.
    """
    reasons = []
    for candidate in AUTO if name == "auto" else (name,):
        try:
            sandbox = SANDBOXES[candidate]()
            sandbox.prove()
        except (OSError, RuntimeError) as error:
            reasons.append(f"{candidate}: {error}")
        else:
            return sandbox
    without = f"; {key}=none would run code from answers without any protection" if name == "auto" else ""
    raise UserError(f"{key}={name}: no sandbox works here ({'; '.join(reasons)}){without}")
