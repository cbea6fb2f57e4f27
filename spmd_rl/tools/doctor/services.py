"""Checks of sandboxes and the sidecar, once per node. Torch-free."""

import asyncio
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

from spmd_rl import sandbox
from spmd_rl.base.errors import one_line
from spmd_rl.config.schema import RewardConfig, RewardsConfig, RlvrConfig
from spmd_rl.sidecar import connect
from spmd_rl.tools.doctor.checks import Failed, Skipped
from spmd_rl.types import AnswerInfo, Node, Prompt, Verdict

NO_SANDBOX = (
    "install bubblewrap (apt install bubblewrap) and allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; docker: --security-opt seccomp=unconfined --cap-add SYS_ADMIN), "
    "or run as root for the fork server; only domains that run the code of answers need one"
)


def bwrap(cfg: RlvrConfig) -> str:
    """Run a program in bubblewrap."""
    return _variant("bwrap")


def forkserver(cfg: RlvrConfig) -> str:
    """Run a program in the fork server's sandbox."""
    return _variant("forkserver")


def _variant(name: str) -> str:
    """Return the time of a run in a sandbox; `Skipped` if it does not work, since another one may."""
    try:
        seconds = _proven(name)
    except (OSError, RuntimeError) as error:
        raise Skipped(f"does not work here: {one_line(str(error))}") from None
    return f"a program in {1000 * seconds:.0f} ms"


def any_sandbox(cfg: RlvrConfig) -> str:
    """Find the sandbox that `reward.<domain>.sandbox` would use: each that is named, or the first of `auto`."""
    chosen, reasons = [], []
    for asked in dict.fromkeys([reward.sandbox for reward in cfg.reward.domains.values()] or ["auto"]):
        # In the order in which a run with `auto` tries them.
        for name in sandbox.AUTO if asked == "auto" else (asked,):
            try:
                _proven(name)
            except (OSError, RuntimeError) as error:
                reasons.append(f"{name}: {one_line(str(error))}")
            else:
                chosen.append(f"{asked}: {name}" if asked != name else name)
                break
        else:
            raise Failed(f"reward.<domain>.sandbox={asked}: no sandbox works here ({'; '.join(reasons)})", NO_SANDBOX)
    return ", ".join(chosen)


def _proven(name: str) -> float:
    made = sandbox.SANDBOXES[name]()
    try:
        began = time.perf_counter()
        made.prove()
        return time.perf_counter() - began
    finally:
        made.close()


class Echo:
    """A rewarder that accepts exactly the ground truth."""

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score 1.0 for the ground truth, else 0.0."""
        return Verdict("ok", float(answer == prompt.ground_truth))


def sidecar(cfg: RlvrConfig) -> str:
    """Start a sidecar at the run's address, get two verdicts, and stop it."""
    rewards = RewardsConfig(domains={"doctor": RewardConfig(f"{Echo.__module__}:Echo", start_seconds=40)})
    prompt = Prompt("doctor", (), "doctor", "42")
    with TemporaryDirectory(prefix="spmd-rl-doctor-") as folder:
        began = time.perf_counter()
        node = Node(0, 0, f"ipc://{folder}/host")
        with connect(rewards, node, cfg.sidecar.bind, keys=cfg.sidecar.keys) as scorer:
            started = time.perf_counter() - began
            scores, seconds = asyncio.run(_ask(scorer.score, prompt))
    if scores != [1.0, 0.0]:
        raise Failed(f"the verdicts are {scores} instead of [1.0, 0.0]", "look for another sidecar at sidecar.bind")
    return f"started in {started:.1f} s, a verdict in {1000 * seconds:.1f} ms"


async def _ask(score: Callable, prompt: Prompt) -> tuple[list[float], float]:
    """Return the scores of a right and a wrong answer, and the seconds of the second."""
    right = await score(prompt, "42", AnswerInfo(1, "stop"))
    began = time.perf_counter()
    wrong = await score(prompt, "41", AnswerInfo(1, "stop"))
    for verdict in (right, wrong):
        if not verdict.scored:
            raise RuntimeError(f"verdict {verdict.status}: {verdict.detail}")
    return [right.score, wrong.score], time.perf_counter() - began
