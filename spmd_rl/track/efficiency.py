"""The least time that a step's arithmetic and traffic can take on given devices: its roofline, phase by phase.

    seconds = roofline(Tokens.of(all_groups), Tokens.of(trained_groups), policy, passes, devices, ceilings)
    efficiency = sum(seconds.values()) / measured

A bound and no model of what happens: every device busy all the time, all answers of a replica decoded side by side,
a prompt that answers share computed once. Only what cannot be parallel is not: an answer's tokens come one by one, each
after a pass over all weights. Left out: rewards (they overlap generation), evaluation and checkpoints, aborted answers,
recomputation of activations; a carried answer counts whole in the step that ends it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from spmd_rl.config.schema import CeilingsConfig
from spmd_rl.model.size import ModelSize

STATE_BYTES = 12
"""Of one trained parameter: float32 master weight and AdamW's two moments. Gradients are dropped, never moved."""
MASTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one device reaches at best."""

    flops: float
    """dense floating-point operations a second, in the compute dtype"""
    memory: float
    """bytes a second between the device and its memory"""
    link: float = math.inf
    """bytes a second from another device of the node"""
    host: float = math.inf
    """bytes a second from, or to, the memory of the host"""


def _of_sheet(teraflops: float, memory_tb: float, link_gb: float, host_gb: float) -> Ceilings:
    """A data sheet's figures, less what nothing reaches: the best matmuls come to 0.8 of the arithmetic, the best
    streams to 0.9 of the memory's bandwidth (on H200, 790 TFLOP/s and 4.3 TB/s)."""
    return Ceilings(0.8e12 * teraflops, 0.9e12 * memory_tb, 1e9 * link_gb, 1e9 * host_gb)


KNOWN = {
    "NVIDIA A100-SXM4-80GB": _of_sheet(312, 2.039, 300, 32),
    "NVIDIA H100 80GB HBM3": _of_sheet(989.4, 3.35, 450, 64),
    "NVIDIA H200": _of_sheet(989.4, 4.8, 450, 64),
    "NVIDIA B200": _of_sheet(2250, 8.0, 900, 64),
    "AMD Instinct MI300X": _of_sheet(1307.4, 5.3, 448, 64),
}
"""By the name that the driver gives. From the vendors' data sheets: dense bfloat16 without sparsity, HBM, NVLink or
Infinity Fabric in one direction, PCIe in one direction."""


def find_ceilings(settings: CeilingsConfig, device: torch.device, dtype: str) -> Ceilings | None:
    """The settings', and for what they leave open the device's own, in bfloat16; None where one does not know."""
    known = _known(device) if dtype == "bfloat16" else None
    flops = settings.flops or (known and known.flops)
    memory = settings.bytes_per_second or (known and known.memory)
    if not flops or not memory:
        return None
    link = settings.link_bytes_per_second or (known.link if known else math.inf)
    host = settings.host_bytes_per_second or (known.host if known else math.inf)
    return Ceilings(flops, memory, link, host)


def _known(device: torch.device) -> Ceilings | None:
    name = "" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return KNOWN.get(name)


class Tokens(NamedTuple):
    """What some groups of answers are made of, over all ranks."""

    prompts: int
    """tokens read and not sampled; those that a group's answers have in common count once"""
    sampled: int
    longest: int
    """sampled tokens of the longest answer"""
    seen: float
    """what the sampled tokens attend to, summed: P R + R^2 / 2 for an answer of R tokens to a prompt of P"""
    seen_by_prompts: float
    """the same of the prompts: P^2 / 2"""

    @classmethod
    def of(cls, groups: Iterable[Sequence[tuple[int, int, int]]]) -> "Tokens":
        """Per answer of a group: its prompt's tokens, its sampled tokens, all its tokens (more: between its turns)."""
        prompts = sampled = longest = 0
        seen = seen_by_prompts = 0.0
        for group in groups:
            shared = max((prompt for prompt, _, _ in group), default=0)
            prompts += shared + sum(total - prompt - own for prompt, own, total in group)
            seen_by_prompts += shared * shared / 2
            for prompt, own, _ in group:
                sampled += own
                longest = max(longest, own)
                seen += prompt * own + own * own / 2
        return cls(prompts, sampled, longest, seen, seen_by_prompts)

    def forward_flops(self, size: ModelSize) -> float:
        """Of one forward pass over all these tokens, with logprobs of the sampled ones.

        Two operations for each weight that a token meets (Kaplan et al., arXiv 2001.08361, section 2.1), and for each
        token it attends to four for each number of a head: a product with its key and one with its value.
        """
        return self.prompt_flops(size) + self.answer_flops(size)

    def prompt_flops(self, size: ModelSize) -> float:
        """The part of what is read."""
        return 2 * size.per_token * self.prompts + 4 * size.attention * self.seen_by_prompts

    def answer_flops(self, size: ModelSize) -> float:
        """The part of what is sampled."""
        return 2 * (size.per_token + size.head) * self.sampled + 4 * size.attention * self.seen


class Pass(NamedTuple):
    """What a step does with one model besides generating."""

    size: ModelSize
    forwards: int
    """passes without gradients: old logprobs, the reference's, the critic's values"""
    updated: bool
    """One pass with gradients, however many optimizer steps share the samples."""


class Devices(NamedTuple):
    """Over what the work is spread."""

    ranks: int
    tp: int
    """ranks that hold one copy of the engine"""
    itemsize: int
    """bytes of a weight in the engine, and of a number in its KV cache"""
    offload: bool
    """The trainer's weights and states leave the device, and come back, once a step."""


def roofline(
    generated: Tokens, trained: Tokens, policy: ModelSize, passes: Sequence[Pass], devices: Devices, ceilings: Ceilings
) -> dict[str, float]:
    """Seconds of `generate`, `logprobs`, `train`, `publish` and `offload`, named as in `time/*` where that has them."""
    flops = ceilings.flops * devices.ranks
    one_pass = [trained.forward_flops(p.size) / flops for p in passes]
    return {
        "generate": generate_seconds(generated, policy, devices, ceilings),
        "logprobs": sum(p.forwards * seconds for p, seconds in zip(passes, one_pass, strict=True)),
        # the backward pass computes a product for the weights' gradient and one for the input's
        "train": sum(3 * p.updated * seconds for p, seconds in zip(passes, one_pass, strict=True)),
        "publish": publish_seconds(policy, devices, ceilings),
        "offload": offload_seconds(passes, devices, ceilings) if devices.offload else 0.0,
    }


def generate_seconds(tokens: Tokens, size: ModelSize, devices: Devices, ceilings: Ceilings) -> float:
    """Prefill + decode. With W bytes of weights and k of KV cache a token, on G devices of F and B:

    prefill = prompt operations / (G F)
    decode = max(longest W / (tp B) + k seen / (G B), answer operations / (G F))
    """
    flops, memory = ceilings.flops * devices.ranks, ceilings.memory
    prefill = tokens.prompt_flops(size) / flops
    weights = tokens.longest * size.read * devices.itemsize / (devices.tp * memory)
    cache = size.kv * devices.itemsize * tokens.seen / (devices.ranks * memory)
    return prefill + max(weights + cache, tokens.answer_flops(size) / flops)


def publish_seconds(size: ModelSize, devices: Devices, ceilings: Ceilings) -> float:
    """Each rank's part of the engine comes over its link once; alone, it is read from and written to its memory."""
    num_bytes = size.parameters * devices.itemsize / devices.tp
    return num_bytes / ceilings.link if devices.ranks > 1 else 2 * num_bytes / ceilings.memory


def offload_seconds(passes: Sequence[Pass], devices: Devices, ceilings: Ceilings) -> float:
    """Weights and states of what is trained, out and in again; weights of what is frozen, in."""
    num_bytes = sum(p.size.parameters * (2 * STATE_BYTES if p.updated else MASTER_BYTES) for p in passes)
    return num_bytes / (devices.ranks * ceilings.host)
