"""Which operations of a step give other bits when they are repeated on several threads, beside busy loops.

    python -m bench.threads --threads 2 4 --times 300 --busy 2 [--as-torch] [--only NAME]

Each operation runs forward and backward on the same input; its outputs and gradients are hashed. Printed: the number
of different hashes (1 is exact) and the median milliseconds. --as-torch: without what `World.open` sets.
"""

import argparse
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.algo import POLICY_LOSSES
from spmd_rl.algo.advantages.tokens import gae
from spmd_rl.algo.inputs import Tokens
from spmd_rl.distributed import World
from spmd_rl.model import attention
from spmd_rl.model.logprobs import Candidates, TokenHead, token_logprobs, top_logprobs
from spmd_rl.model.lora import Adapter
from spmd_rl.model.moe import grouped_linear
from spmd_rl.train.fsdp2.muon import orthogonalized
from tests.models import tiny

Operation = Callable[[], list[Tensor]]
N, HIDDEN, VOCABULARY = 1024, 64, 1031
EQUAL = torch.arange(N) % 3 * 500
"""Rows of which few are different."""
KEYS = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "kimi": {"kimi_tau": 0.1},
    "topr": {},
}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw the same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of(function: Callable[..., Any], *inputs: Tensor) -> Operation:
    """Return the function's outputs for the inputs, and their gradients."""

    def run() -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        found = function(*leaves)
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        torch.autograd.backward(outputs, [normal(*x.shape, dtype=x.dtype, seed=1) for x in outputs])
        return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return run


def rows() -> Iterator[tuple[str, Operation]]:
    """Select rows and sum into them, most of them equal."""
    x = normal(N, HIDDEN)
    yield "x[index]", of(lambda x: x[EQUAL], x)
    yield "x[:, index]", of(lambda x: x[:, EQUAL], x[None])
    yield "index_select", of(lambda x: x.index_select(0, EQUAL), x)
    yield "embedding", of(lambda x: F.embedding(EQUAL, x), x)
    yield "gather", of(lambda x: x.gather(0, EQUAL[:, None].expand(-1, HIDDEN)), x)
    yield "index_add", of(lambda x: torch.zeros_like(x).index_add(0, EQUAL, x), x)
    yield "scatter_add", of(lambda x: torch.zeros_like(x).scatter_add(0, EQUAL[:, None].expand(-1, HIDDEN), x), x)
    yield "index_copy", of(lambda x: torch.zeros(2 * N, HIDDEN).index_copy(0, torch.arange(N) * 2, x), x)
    yield "sum of tokens, 1 dimension", of(lambda x: x.new_zeros(N).index_add(0, EQUAL, x)[EQUAL], normal(N))
    many = torch.arange(2**17) // 1000
    yield "sum of many tokens, 1 dimension", of(lambda x: x.new_zeros(132).index_add(0, many, x)[many], normal(2**17))


def layers() -> Iterator[tuple[str, Operation]]:
    """Compute parts of a layer."""
    for dtype, n in ((torch.float32, N), (torch.bfloat16, 256)):
        yield f"linear, {dtype}", of(F.linear, normal(n, HIDDEN, dtype=dtype), normal(256, HIDDEN, dtype=dtype))
    x = normal(N, HIDDEN)
    yield "rms norm", of(lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-6), x, normal(HIDDEN))
    yield "gated linear unit", of(lambda x, y: F.silu(x) * y, x, normal(N, HIDDEN, seed=2))
    yield "softmax and top-k", of(lambda x: x.softmax(-1).topk(4).values, x)
    counts = [N // 2, 0, N // 4, N // 4]
    yield "grouped linear", of(lambda x, w: grouped_linear(x, w, counts), x, normal(4, HIDDEN, HIDDEN))
    yield "adapter", of(lambda w, a, b: Adapter(a, b, 2.0).added_to(w), x, normal(8, HIDDEN), normal(N, 8))
    starts = torch.tensor([0, 150, 600, 800, N])
    for name, parents in (("packed", None), ("of a prefix tree", torch.tensor([-1, 0, 0, 0]))):
        packing = attention.Packing.of(starts, parents)
        q, k, v = normal(1, 4, N, 32), normal(1, 2, N, 32, seed=1), normal(1, 2, N, 32, seed=2)
        module = torch.nn.Module()
        yield (
            f"attention, {name}",
            of(lambda q, k, v, p=packing: attention.packed_attention(module, q, k, v, None, 0.2, p)[0], q, k, v),
        )


def heads() -> Iterator[tuple[str, Operation]]:
    """Compute the logprobs of targets."""
    hidden, weight, targets = normal(N, HIDDEN), normal(3 * VOCABULARY, HIDDEN), torch.arange(N) % VOCABULARY
    yield "logprobs and entropy", of(lambda h, w: token_logprobs(h, w, targets), hidden, weight)
    several = torch.stack([targets, targets, targets + 7], 1)
    yield "of several targets", of(lambda h, w: token_logprobs(h, w, several), hidden, weight)
    among = Candidates(torch.arange(N).repeat_interleave(2), torch.stack([targets, targets + 5], 1).flatten())
    yield "among candidates", of(lambda h, w: token_logprobs(h, w, targets, support=among), hidden, weight)
    yield "top logprobs", lambda: list(top_logprobs(hidden, weight, 8))
    yield "log-softmax and gather", of(lambda x: x.log_softmax(-1).gather(1, targets[:, None]), normal(N, VOCABULARY))


def losses() -> Iterator[tuple[str, Operation]]:
    """Compute losses and advantages over many tokens."""
    n = 2**16
    samples, zeros = torch.arange(n) // 5000, torch.zeros(n)

    def tokens(logprobs: Tensor) -> Tokens:
        return Tokens(logprobs, logprobs.detach() * 1.01, zeros, normal(n, seed=3), zeros, samples, samples)

    for name, keys in KEYS.items():
        yield f"loss {name}", of(lambda x, f=POLICY_LOSSES[name], k=keys: f(tokens(x), **k)[0], -normal(n).abs())
    advantages = (normal(n).double(), normal(n, seed=1).double(), samples)
    yield "advantages, gae", lambda: list(gae(*advantages, gamma=0.99, lam=0.95))


def updates() -> Iterator[tuple[str, Operation]]:
    """Update weights."""

    def adamw() -> list[Tensor]:
        weights = [torch.nn.Parameter(normal(VOCABULARY, HIDDEN, seed=i)) for i in range(4)]
        optimizer = torch.optim.AdamW(weights, foreach=True)
        for step in range(2):
            for i, weight in enumerate(weights):
                weight.grad = normal(VOCABULARY, HIDDEN, seed=9 * step + i)
            norm = torch.nn.utils.clip_grad_norm_(weights, 0.1)
            optimizer.step()
        return [norm, *weights]

    yield "gradient norm, clip and AdamW", adamw
    yield "Muon", lambda: [orthogonalized(normal(2, HIDDEN, 2 * HIDDEN))]


def models(folder: Path) -> Iterator[tuple[str, Operation]]:
    """Run models of transformers under our head, where answers share a prompt."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "head_dim": 16}
    for kind in ("llama", "qwen3_moe"):
        attention.register()
        path, length = tiny(kind, folder / kind, **sizes), 640
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention.NAME, dtype=torch.float32)
        head = TokenHead(model.get_output_embeddings())
        model.set_output_embeddings(head)
        packing = attention.Packing.of(torch.arange(0, length + 1, 160), torch.tensor([-1, 0, 0, 0]))
        keep = torch.cat([torch.full((512,), 159), torch.arange(512)])
        head.targets = torch.arange(len(keep)) % 256

        def run(model: Any = model, packing: Any = packing, keep: Tensor = keep, length: int = length) -> list[Tensor]:
            model.zero_grad()
            ids = torch.arange(length)[None]
            found = model(
                input_ids=ids % 250, position_ids=ids % 160, packing=packing, use_cache=False, logits_to_keep=keep
            ).logits
            found.backward(normal(*found.shape, seed=1))
            return [found, *(p.grad for p in model.parameters() if p.grad is not None)]

        yield f"model {kind}", run


def digest(tensors: list[Tensor]) -> str:
    """Hash all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many loops take the cores."""
    # They end with this process, though it be killed.
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--as-torch", action="store_true")
    parser.add_argument("--only", default="", help="operations whose name matches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, World.open(Path(folder) / "run", 3600.0), busy(options.busy):
        if options.as_torch:
            torch.use_deterministic_algorithms(False)
        table = [*rows(), *layers(), *heads(), *losses(), *updates(), *models(Path(folder))]
        for name, operation in table:
            if not re.search(options.only, name):
                continue
            columns = []
            for threads in options.threads:
                torch.set_num_threads(threads)
                seen, seconds = set(), []
                for _ in range(options.times):
                    begin = time.perf_counter()
                    found = operation()
                    seconds.append(time.perf_counter() - begin)
                    seen.add(digest(found))
                columns += [str(len(seen)), f"{1000 * statistics.median(seconds):.1f}"]
            print(f"| {name} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
