"""Trajectories of agents, made up: turns with steps, whole or cut into segments, for tests of credit and training."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from spmd_rl.rollout.collected import Collected
from spmd_rl.types import AgentStep, Group, Message, Prompt, Sample, Turn, Verdict
from tests.fakes import table_of

SEGMENTS = 1 << 16
"""What the numbers of a trajectory's segments lie apart."""


@dataclass(frozen=True)
class Step:
    """One turn of a trajectory."""

    reward: float = 0.0
    state: int = 0
    num_tokens: int = 2
    """Sampled ones."""
    observation: int = 2
    """Tokens before it, of the environment."""
    has_step: bool = True


def turns(steps: Sequence[Step], rng: Random, prompt: Sequence[int] = (1, 2, 3)) -> list[Turn]:
    """Turns of random tokens; the first one answers to `prompt`."""
    made = []
    for number, step in enumerate(steps):
        given = list(prompt) if number == 0 else [rng.randrange(256) for _ in range(step.observation)]
        ids = [rng.randrange(256) for _ in range(step.num_tokens)]
        logprobs = [rng.gauss(-5.5, 0.3) for _ in ids]
        reply = AgentStep("", step.reward, step.state) if step.has_step else None
        arrays = array("i", given), array("i", ids), array("f", logprobs), array("i", [0] * len(ids))
        made.append(Turn(*arrays, "stop", step=reply))
    return made


def history(made: Sequence[Turn]) -> list[int]:
    """All tokens of some turns."""
    return [token for turn in made for token in (*turn.prompt_ids, *turn.token_ids)]


def trajectory(
    ticket: int,
    answer: int,
    steps: Sequence[Step],
    cuts: Sequence[int] = (),
    status: str = "ok",
    score: float | None = None,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
) -> list[Sample]:
    """The samples of a trajectory, which begins a segment at each turn in `cuts` with all tokens so far as its prompt.

    score: default, the sum of the rewards.
    """
    made = turns(steps, Random(f"{seed} {ticket} {answer}"), prompt)
    total = sum(step.reward for step in steps) if score is None else score
    bounds = [0, *cuts, len(steps)]
    samples = []
    for number, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = list(made[begin:end])
        if begin:
            first = own[0]
            before = [*history(made[:begin]), *first.prompt_ids]
            arrays = array("i", before), first.token_ids, first.logprobs, first.versions
            own[0] = Turn(*arrays, first.finish_reason, step=first.step)
        last = end == len(steps)
        verdict = Verdict(status, total) if last else Verdict("ok")
        samples.append(Sample(ticket, answer + number * SEGMENTS, tuple(own), verdict, unit=answer, last=last))
    return samples


def group(ticket: int, trajectories: Sequence[Sequence[Sample]], domain: str = "toy") -> Group:
    """Of one prompt."""
    prompt = Prompt(f"{ticket:032x}", (Message("user", "?"),), domain, "")
    return Group(prompt, ticket, tuple(sample for samples in trajectories for sample in samples))


def collected(groups: Sequence[Group], rank_of=lambda sample: 0, rank: int = 0) -> Collected:
    """A step as `rank` sees it, which holds the samples that `rank_of` says."""
    held = [Group(g.prompt, g.ticket, tuple(s for s in g.samples if rank_of(s) == rank)) for g in groups]
    return Collected(1, tuple(g for g in held if g.samples), (), table_of(groups, rank_of), 0.0, 0, 0)
