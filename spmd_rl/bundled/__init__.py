"""What is shipped with the package, under a name that no folder of a user hides: `spmd_rl.bundled.envs.sokoban`.

`rewards`, `envs`, `configs` and `launch` lie here in a wheel, and at the root of a clone, which needs no installation.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
HOME = _HERE if (_HERE / "configs").is_dir() else _HERE.parents[1]
"""The folder of the four"""
PLUGINS = ("rewards", "envs")
"""Those that settings name without this package's name: `rewards.math_verify:MathReward`"""

__path__ = [str(HOME)]
