"""What the fork server of the tests imports, once for all the processes that it forks; see `tests/forked.py`."""

import gc
import importlib

for name in (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "spmd_rl.checkpoint",
    "spmd_rl.engine.native",
    "spmd_rl.learn",
    "spmd_rl.rollout",
    "spmd_rl.sidecar",
    "spmd_rl.weights",
    "spmd_rl.track",
    "spmd_rl.train.fsdp2.backend",
    "tests.dist.harness",
    "tests.e2e.runs",
):
    importlib.import_module(name)

gc.freeze()  # or each child searches all of these modules for cycles
