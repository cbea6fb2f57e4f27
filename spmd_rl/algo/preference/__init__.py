"""Preference losses by name: pure functions of the logprobs of whole answers, a loss for each comparison.

`PAIR_LOSSES[name](pairs, **keys) -> [P]`; `JUDGED_LOSSES[name](judged, **keys) -> [S]`; the keyword names are keys of
`preference`. `rewards` is what a loss takes for the reward of an answer.
"""

from spmd_rl.algo.preference.judged import binary as binary
from spmd_rl.algo.preference.judged import kto
from spmd_rl.algo.preference.pairs import bradley_terry as bradley_terry
from spmd_rl.algo.preference.pairs import dpo, hinge, ipo, simpo

PAIR_LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "hinge": hinge}
JUDGED_LOSSES = {"kto": kto}
