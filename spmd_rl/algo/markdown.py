"""Writes `docs/ALGORITHMS.md` from the docstrings.

    python -m spmd_rl.algo.markdown > docs/ALGORITHMS.md

A docstring opens with one line; then come a formula (indented), prose, and the block of `Source:`, `Keys:` and `Use:`.
Text after that block (shapes, dtypes) is not on the page. A test checks that the file is current.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.algo import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    POLICY_TERMS,
    TOKEN_ADVANTAGES,
    diffusion,
    kl,
    moments,
    selection,
    shaping,
    values,
)
from spmd_rl.algo.advantages import ANSWER_ADVANTAGES, STEP_ADVANTAGES
from spmd_rl.algo.advantages.tokens import token_rewards
from spmd_rl.algo.correction import correction
from spmd_rl.algo.preference import JUDGED_LOSSES, PAIR_LOSSES, binary, bradley_terry

Function = Callable[..., Any]
FIELDS = ("Source", "Keys", "Use")
INTRO = """\
# Algorithms

<!-- Written by `python -m spmd_rl.algo.markdown > docs/ALGORITHMS.md`; edit the docstrings in spmd_rl/algo/. -->

Each algorithm is one short function under `spmd_rl/algo/`, with the name that the settings use. Its keys are those of
`algorithm`; `--help` has their defaults, and the recipes that combine them (`algorithm=<recipe>`). All
statistics are over the global batch, so no result depends on the number of ranks, the size of micro-batches or the
packing. An answer without a score is in no mean and in no loss. A trajectory (all turns of
one episode) counts once: it is one sequence to every mean and ratio, even if it is stored as several rows of tokens.
"""
OWN = """\
## Your own

`algorithm.loss` and `algorithm.advantage` also take a function of your own, as `module:function`, from a file on
`PYTHONPATH`.

```python
# my_algorithm.py
import torch


def asymmetric(tokens, *, clip_low, clip_high, strength=1.0):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    return torch.where(tokens.advantages < 0, strength * loss, loss), {"my_algorithm/ratio": ratio}


def centred(scored):
    return scored.scores - scored.scores.mean()
```

```
algorithm.loss=my_algorithm:asymmetric algorithm.args.strength=0.5 algorithm.advantage=my_algorithm:centred
```

A loss gets the `Tokens` of whole samples and returns float [N], one value per token, alone or with metrics of the same
shape. An advantage with one parameter that is no setting is one of answers: it gets the `Scored` of the global batch
and returns float [n]. With three it is one of tokens: it gets `rewards, values, samples`, of which `values` is None
(only `gae` and `turn_gae` have a critic), and returns two tensors [N], advantages and returns; the second is not used.
There is none of an agent's steps. `spmd_rl/algo/inputs.py` has these types, `spmd_rl/algo/moments.py` helpers such as
`group_mean`. Every other parameter is a setting: the key of `algorithm` of that name, or else `algorithm.args.<name>`.
A mistake in these is reported before the start; an exception names its file and line, and `error.txt` of the run has
the traceback. All ranks must have the same file. Editing it and resuming is refused: its digest is part of the run's
identity.
"""


@dataclass(frozen=True)
class Section:
    """A section of the page: a title, an introduction and functions by name."""

    title: str
    intro: str
    members: Mapping[str, Function]


def _named(*functions: Function) -> dict[str, Function]:
    return {function.__name__: function for function in functions}


SCORES = (shaping.scale_shift, shaping.format_penalty, shaping.repetition_penalty, shaping.overlong_penalty)
MASKS = (shaping.max_len_mask, shaping.difficulty_mask, shaping.variance_mask, shaping.error_max_len_mask)
WEIGHTS = (shaping.difficulty_weight, shaping.length_weight, shaping.mean_one)
SECTIONS = (
    Section(
        "Advantages of answers",
        "`algorithm.advantage`: one number for all tokens of an answer, in all its turns.",
        ANSWER_ADVANTAGES,
    ),
    Section(
        "Advantages of an agent's steps",
        "`algorithm.advantage`: one number for each turn, for the tokens of that turn alone. The rewards of the steps "
        "are made to add up to the score: any difference (a penalty, a verdict on the episode) goes to the last step.",
        STEP_ADVANTAGES,
    ),
    Section(
        "Advantages of tokens",
        "`algorithm.advantage`: from one reward per token, which `token_rewards` makes of the score, or of the rewards "
        "of an agent's steps. Tokens of the environment between two turns are in no sum and are not discounted. "
        "`token_rewards` (keys: `kl_reward_coef`, `kl_reward_estimator`) runs before the estimator, `whiten` (key: "
        "`whiten_advantages`) after it.",
        {**TOKEN_ADVANTAGES, **_named(token_rewards, moments.whiten)},
    ),
    Section("Policy losses", "`algorithm.loss`: one value per token, weighted by the aggregation.", POLICY_LOSSES),
    Section(
        "Terms of the loss",
        "These can be added to any policy loss; one with a coefficient of 0 is not computed.",
        POLICY_TERMS,
    ),
    Section("Aggregation", "`algorithm.loss_agg`: the weight of each token, by global counts.", AGGREGATIONS),
    Section(
        "KL to the reference",
        "`algorithm.kl_estimator` in the loss, `kl_reward_estimator` in the reward; p: the policy, q: the reference.",
        {**KL_ESTIMATORS, **_named(kl.adaptive_coef)},
    ),
    Section("Importance correction", "`algorithm.correction`.", _named(correction)),
    Section(
        "Selection of tokens",
        "The tokens that the losses `clip_cov` and `kl_cov` mark.",
        _named(selection.covariance, selection.clip_cov_keys),
    ),
    Section(
        "Scores",
        "These change the scores before the advantages, in this order.",
        _named(*SCORES, shaping.normalise, shaping.clip),
    ),
    Section(
        "Masks and weights",
        "These decide which answers are trained on, and with what weight.",
        _named(*MASKS, *WEIGHTS),
    ),
    Section(
        "Preferences",
        "`preference.loss` of `python -m spmd_rl.dpo`, with keys of `preference`. r is the reward of an answer, log pi "
        "- log pi_ref summed over its tokens (of the mean token where `length_normalised`), d the reward of the chosen "
        "answer less that of the rejected one. A step minimises the mean over its pairs, or answers.",
        {**PAIR_LOSSES, **JUDGED_LOSSES, **_named(bradley_terry, binary)},
    ),
    Section(
        "Steps and losses of diffusion",
        "`feedback` of `python -m spmd_rl.reward_fl`. x: a latent, s: its noise level, v: the velocity.",
        _named(
            *(diffusion.flow_noise, diffusion.constant_noise, diffusion.sde_step),
            *(diffusion.flow_grpo, diffusion.step_kl, diffusion.nft),
        ),
    ),
    Section(
        "The critic",
        "These need `algorithm.advantage=gae` or `turn_gae`.",
        _named(values.value_loss, values.explained_variance),
    ),
)


def markdown() -> str:
    """Return the page of all algorithms."""
    return "\n".join([INTRO, OWN, *(line for section in SECTIONS for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "", section.intro, "")
    for name, function in section.members.items():
        yield from (f"### `{name}`", "", *_entry(function))


def _entry(function: Function) -> Iterator[str]:
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
    """Return the texts of `Source:`, `Keys:` and `Use:`, each on one line."""
    names = "|".join(FIELDS)
    found = re.findall(rf"^({names}): (.*?)(?=^(?:{names}):|^$|\Z)", inspect.getdoc(function), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


if __name__ == "__main__":
    print(markdown(), end="")
