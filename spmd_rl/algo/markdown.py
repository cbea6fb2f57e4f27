"""`docs/ALGORITHMS.md`: every estimator and loss with its formula, source, keys and use, from the docstrings.

    python -m spmd_rl.algo.markdown > docs/ALGORITHMS.md

A docstring opens with one line; then come a formula (indented), prose, and the block of `Source:`, `Keys:` and `Use:`.
What stands after that block (shapes, dtypes) is for those who call the function and is left out of the page. A test
holds the file to this.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.algo import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    POLICY_TERMS,
    TOKEN_ADVANTAGES,
    kl,
    masks,
    moments,
    selection,
    shaping,
    values,
)
from spmd_rl.algo.advantages.tokens import token_rewards
from spmd_rl.algo.correction import correction

Function = Callable[..., Any]
FIELDS = ("Source", "Keys", "Use")
INTRO = """\
# Algorithms

<!-- Written by `python -m spmd_rl.algo.markdown > docs/ALGORITHMS.md`; edit the docstrings in spmd_rl/algo/. -->

Each is one short function under `spmd_rl/algo/`, named here as in the settings. Keys are those of `algorithm`; their
defaults stand in [CONFIG.md](CONFIG.md), which also lists the recipes that put these together (`algorithm=<recipe>`).
All statistics are over the global batch, so no result depends on the number of ranks, the size of micro-batches or the
packing. An answer whose verdict is no score is in no mean and in no loss.
"""


@dataclass(frozen=True)
class Section:
    """One chapter of the page."""

    title: str
    intro: str
    members: Mapping[str, Function]


def _named(*functions: Function) -> dict[str, Function]:
    return {function.__name__: function for function in functions}


SCORES = (shaping.scale_shift, shaping.format_penalty, shaping.repetition_penalty, shaping.overlong_penalty)
MASKS = (masks.max_len_mask, masks.difficulty_mask, masks.error_max_len_mask)
WEIGHTS = (masks.difficulty_weight, masks.length_weight, masks.mean_one)
SECTIONS = (
    Section("Advantages of answers", "`algorithm.advantage`: one number for all tokens of an answer.", ADVANTAGES),
    Section(
        "Advantages of tokens",
        "`algorithm.advantage`: from one reward per token, which `token_rewards` makes of the score.",
        {**TOKEN_ADVANTAGES, **_named(token_rewards, moments.whiten)},
    ),
    Section("Policy losses", "`algorithm.loss`: one value per token, weighed by the aggregation.", POLICY_LOSSES),
    Section("Terms of the loss", "Added to any policy loss; a coefficient of 0 leaves one out.", POLICY_TERMS),
    Section("Aggregation", "`algorithm.loss_agg`: the weight of each token, by global counts.", AGGREGATIONS),
    Section(
        "KL to the reference",
        "`algorithm.kl_estimator` in the loss, `kl_reward_estimator` in the reward; p: the policy, q: the reference.",
        {**KL_ESTIMATORS, **_named(kl.adaptive_coef)},
    ),
    Section("Correction of the engine's mismatch", "`algorithm.correction`.", _named(correction)),
    Section(
        "Choice of tokens",
        "Which tokens the losses `clip_cov` and `kl_cov` mark.",
        _named(selection.covariance, selection.clip_cov_keys),
    ),
    Section("Scores", "Before the advantages, in this order.", _named(*SCORES, shaping.normalise, shaping.clip)),
    Section("Masks and weights", "Which answers train, and how much.", _named(*MASKS, *WEIGHTS)),
    Section("The critic", "With `algorithm.advantage=gae`.", _named(values.value_loss, values.explained_variance)),
)


def markdown() -> str:
    """The whole page."""
    return "\n".join([INTRO, *(line for section in SECTIONS for line in _chapter(section))])


def _chapter(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "", section.intro, "")
    for name, function in section.members.items():
        yield from (f"### `{name}`", "", *_entry(function))


def _entry(function: Function) -> Iterator[str]:
    """The docstring up to its shapes: a formula becomes a code block, each field a line of a list."""
    for paragraph in inspect.getdoc(function).split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            yield from ("```", *(line[4:] for line in lines), "```", "")
        elif lines[0].startswith(tuple(f"{field}:" for field in FIELDS)):
            yield from (f"* **{name}**: {text}" for name, text in fields(function).items())
            yield ""
            return
        else:
            yield from (" ".join(lines), "")


def fields(function: Function) -> dict[str, str]:
    """What a docstring says under `Source:`, `Keys:` and `Use:`, each on one line."""
    names = "|".join(FIELDS)
    found = re.findall(rf"^({names}): (.*?)(?=^(?:{names}):|^$|\Z)", inspect.getdoc(function), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


if __name__ == "__main__":
    print(markdown(), end="")
