"""Shipped folders, under a name that no user's folder hides: `spmd_rl.bundled.envs.sokoban`.

`rewards`, `envs`, `configs` and `launch` are here in a wheel, and at the root of a clone.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
HOME = _HERE if (_HERE / "configs").is_dir() else _HERE.parents[1]
PLUGINS = ("rewards", "envs")
"""Folders that settings name without this package: `rewards.math_verify:MathReward`"""

__path__ = [str(HOME)]
