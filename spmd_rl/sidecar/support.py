"""Search for rows that a run's rewards cannot judge (`unsupported(prompt)`); they are left out before the run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from spmd_rl.base.errors import UserError, tell
from spmd_rl.base.targets import build_target, import_target
from spmd_rl.sidecar.services import service_factories
from spmd_rl.types import Prompt, Rewarder

if TYPE_CHECKING:
    from spmd_rl.config.schema import RewardConfig

NAMED = 3


def may_refuse(domain: str, reward: "RewardConfig") -> bool:
    """Return True if a domain's rewarder can be asked about rows outside of its worker."""
    needs = reward.devices or {"url", "model"} & reward.args.keys()
    return not needs and hasattr(import_target(f"reward.{domain}.target", reward.target), "unsupported")


def find_unsupported(rows: Iterable[tuple[int, Prompt]], rewards: Mapping[str, "RewardConfig"]) -> list[list]:
    """Return [number, reason] of each row that its domain's rewarder cannot judge.

    The rewarder is built here, with a sandbox. If that fails, the rows count as supported.
    """
    rows, found = list(rows), []
    for domain, reward in rewards.items():
        own = [(number, prompt) for number, prompt in rows if prompt.domain == domain]
        if not own or not may_refuse(domain, reward):
            continue
        services, opened = dict(service_factories(f"reward.{domain}", reward.sandbox, packages=reward.packages)), []
        make = services["sandbox"]
        services["sandbox"] = lambda make=make, opened=opened: opened.append(make()) or opened[-1]
        try:
            rewarder = build_target(f"reward.{domain}", reward.target, reward.args, services=services)
            found += [[number, reason] for number, prompt in own if (reason := unsupported(rewarder, prompt))]
        except UserError as error:
            tell(f"reward.{domain}: rows were not searched for unsupported tests: {error}")
        finally:
            for sandbox in opened:
                sandbox.close()
    return found


def unsupported(rewarder: Rewarder, prompt: Prompt) -> str:
    """Return why a rewarder cannot judge a row; empty if it can."""
    try:
        return rewarder.unsupported(prompt) if hasattr(rewarder, "unsupported") else ""
    except (RuntimeError, ValueError, KeyError, TypeError):
        # A malformed row is no unsupported one: its verdicts report the error.
        return ""


def counted(reasons: Iterable[str]) -> str:
    """Return reasons with their counts, most frequent first."""
    counts = Counter(reasons).most_common()
    more = sum(count for _, count in counts[NAMED:])
    listed = [f"{count} x {reason:.80}" for reason, count in counts[:NAMED]]
    return "; ".join([*listed, f"{more} for other reasons"] if more else listed)
