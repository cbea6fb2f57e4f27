"""The tasks of an agent: environment and seed of each ticket.

A task is a `Prompt` without messages, whose domain is the environment's tag. Tasks are endless, and a pure function of
the run's seed; all answers to one play the same world.
"""

from fractions import Fraction
from hashlib import blake2b

from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.data.mix import Mix
from spmd_rl.data.seeds import counter_seed
from spmd_rl.types import Prompt

SEED_BITS = 30
"""Bits of a training seed. Many environments take 31 bits; the highest marks held-out seeds."""


class EnvTasks:
    """The tasks of a run, with the interface of `data.Prompts`; training tasks are endless."""

    train: tuple[Prompt, ...] = ()

    def __init__(self, envs: EnvsConfig, num_eval: int) -> None:
        """num_eval: held-out tasks, divided by share; one of n environments with share 0 gets an n-th. UserError for
        shares with too long a period.
        """
        shares = {tag: Fraction(str(env.share)) for tag, env in envs.tags.items()}
        mean = sum(shares.values()) / sum(share > 0 for share in shares.values())
        self._mix = Mix(shares, "env.<tag>.share")
        held_out = Mix({tag: share or mean for tag, share in shares.items()}, "env.<tag>.share")
        self._targets = {tag: [env.target, env.args, env.eval_args] for tag, env in sorted(envs.tags.items())}
        # Held-out tasks do not depend on the run's seed, so that runs can be compared by them.
        self.eval = tuple(self._held_out(*held_out.ticket(number)) for number in range(num_eval))

    def ticket(self, ticket: int, seed: int) -> tuple[int, Prompt]:
        """Return the epoch, always 0, and the task of a ticket."""
        tag, index = self._mix.ticket(ticket)
        return 0, _task(tag, counter_seed(seed, "env", tag, index) % (1 << SEED_BITS), False)

    def demonstration(self, number: int, seed: int) -> Prompt:
        """Return a task for demonstrations, which no ticket uses."""
        tag, index = self._mix.ticket(number)
        return _task(tag, counter_seed(seed, "env", "demonstration", tag, index) % (1 << SEED_BITS), False)

    def _held_out(self, tag: str, index: int) -> Prompt:
        # The highest bit keeps held-out seeds apart from training seeds.
        return _task(tag, (1 << SEED_BITS) + counter_seed("env", "eval", tag, index) % (1 << SEED_BITS), True)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits over the environments and their arguments."""
        return blake2b(repr([self._targets, len(self.eval)]).encode(), digest_size=16).hexdigest()


def _task(tag: str, seed: int, held_out: bool) -> Prompt:
    name = blake2b(f"{tag}:{seed}".encode(), digest_size=16).hexdigest()
    return Prompt(name, (), tag, "", {"seed": seed, "held_out": held_out})
