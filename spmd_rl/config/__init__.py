"""Settings: dataclasses with defaults and checks, composed by Hydra, checked before the process group forms.

Torch-free. A door needs two names of it; other rooms import the dataclass they are given from `schema`.
"""

from spmd_rl.config.main import main
from spmd_rl.config.schema import RlvrConfig

__all__ = ["RlvrConfig", "main"]
