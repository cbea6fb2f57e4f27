"""Settings: dataclasses with defaults and checks, composed by Hydra and checked before the process group forms.

A pipeline imports these two names; other modules import the dataclass that they need from `schema`.
"""

from spmd_rl.config.main import main
from spmd_rl.config.schema import AgenticConfig, RlvrConfig

__all__ = ["AgenticConfig", "RlvrConfig", "main"]
