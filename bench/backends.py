"""The training backends on the same work: CPU seconds, bytes held and bytes sent of an update, on two ranks.

    python -m bench.backends

A random Llama of 4 layers and 256 columns in float32, three updates of the same 150 tokens, the last two counted. Held
is what a rank keeps of masters and moments. Sent is what it puts into collectives and messages where each rank is on a
machine of its own (on one, FSDP's go through shared memory), groups of one rank included.
"""

import json
import tempfile
import time
from pathlib import Path

from spmd_rl.distributed import World
from tests.dist.harness import run_ranks
from tests.dist.test_bytes import Traffic
from tests.models import tiny
from tests.training import TEMPERATURE, built, global_batch, loss, share_of

UPDATES = 2
CASES = {
    "fsdp2": ("fsdp2", {}),
    "fsdp2, tp 2": ("fsdp2", {"tp": 2}),
    "fsdp2, pp 2": ("fsdp2", {"pp": 2}),
    "deepspeed, stage 1": ("deepspeed", {"stage": 1}),
    "deepspeed, stage 3": ("deepspeed", {"stage": 3}),
    "megatron": ("megatron", {}),
    "megatron, tp 2": ("megatron", {"tp": 2}),
    "megatron, pp 2": ("megatron", {"pp": 2}),
}
SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 1024}


def measured(world: World, path: str, name: str, axes: dict[str, int]) -> dict[str, float]:
    """Of this rank, a mean over the updates that are counted."""
    role = built(name, world, path, axes=axes, budget=60)
    share = share_of(role, "dealt", global_batch())
    role.update(share, loss, TEMPERATURE)
    began, traffic = time.process_time(), Traffic()
    with traffic:
        for _ in range(UPDATES):
            metrics = role.update(share, loss, TEMPERATURE)
    seconds = (time.process_time() - began) / UPDATES
    sent = sum(count for kind, count in traffic.bytes.items() if "recv" not in kind) / UPDATES
    held = sum(one.tensor.nbytes for one in role.model.state() if one.tensor is not None)
    return {"seconds": seconds, "sent": sent, "held": held, "norm": metrics["grad_norm"]}


def main() -> None:
    """Measure each backend in ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny("llama", Path(folder), **SIZES))
        for case, (name, axes) in CASES.items():
            ranks = run_ranks(2, measured, path, name, axes, timeout=600, stall_seconds=600)
            apart = run_ranks(2, measured, path, name, axes, per_machine=1, timeout=600, stall_seconds=600)
            found = {key: [one[key] for one in ranks] for key in ("seconds", "held", "norm")}
            print(json.dumps({"case": case, **found, "sent": [one["sent"] for one in apart]}), flush=True)


if __name__ == "__main__":
    main()
