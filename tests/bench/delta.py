"""Bytes and CPU seconds of `weights.delta` between two exports of a policy, and the bytes of other encodings.

    python -m tests.bench.delta RUN_DIR/checkpoints/step-000001/hf RUN_DIR/checkpoints/step-000002/hf ...

One line for each pair of neighbours; megabytes are 10^6 bytes.
"""

import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from spmd_rl.weights import messages
from spmd_rl.weights.delta import decode, encode, word


def compare(older: Path, newer: Path) -> dict[str, float]:
    """Return what one version costs the next; a tensor whose encoding is no smaller counts as a whole one."""
    base, new = (load_file(folder / "model.safetensors") for folder in (older, newer))
    bytes_of = dict.fromkeys(("whole", "delta", "delta_zlib1", "int32_positions", "bitmap"), 0)
    seconds = dict.fromkeys(("encode", "decode", "hash", "zlib1"), 0.0)
    num_words = num_changed = 0
    for name, tensor in new.items():
        unit = word(str(tensor.dtype).removeprefix("torch."))
        old, now = (memoryview(each.reshape(-1).view(torch.uint8).numpy()) for each in (base[name], tensor))
        clock = [time.process_time()]
        payload = encode(old, now, unit)
        clock.append(time.process_time())
        if payload is not None:
            assert decode(old, memoryview(payload), unit) == now
        clock.append(time.process_time())
        messages.digest(old), messages.digest(now)
        clock.append(time.process_time())
        sent = payload or bytes(now)
        packed = len(zlib.compress(sent, 1))
        clock.append(time.process_time())
        for key, began, ended in zip(seconds, range(4), range(1, 5), strict=True):
            seconds[key] += clock[ended] - clock[began]
        words = now.nbytes // unit
        changed = int(np.count_nonzero(np.frombuffer(old, f"u{unit}") != np.frombuffer(now, f"u{unit}")))
        num_words, num_changed = num_words + words, num_changed + changed
        sizes = len(sent), packed, changed * (4 + unit), words / 8 + changed * unit
        bytes_of["whole"] += now.nbytes
        for key, size in zip(list(bytes_of)[1:], sizes, strict=True):
            bytes_of[key] += min(size, now.nbytes)
    megabytes = {f"{key}_mb": round(size / 1e6, 3) for key, size in bytes_of.items()}
    cpu = {f"{key}_cpu_s": round(value, 3) for key, value in seconds.items()}
    return {"changed": round(num_changed / num_words, 5), **megabytes, **cpu}


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    for older, newer in zip(folders, folders[1:], strict=False):
        print(json.dumps(compare(older, newer)))
