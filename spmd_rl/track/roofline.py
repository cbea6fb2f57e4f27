"""The roofline of a step: the least time for its arithmetic and memory traffic on given devices, by phase.

    seconds = roofline(TokenCounts.of(all_groups), TokenCounts.of(trained_groups), policy, passes, devices, spec)
    efficiency = sum(seconds.values()) / measured

It is a bound, not a model: every device is always busy, all answers of a replica are decoded in parallel, and a prompt
shared by answers is computed once. Only the tokens of an answer are sequential, each after a pass over all weights. Not
counted are rewards (they overlap generation), evaluation, checkpoints, publishing, aborted answers and recomputed
activations; a partial rollout counts completely in the step that ends it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from spmd_rl.config.schema import DeviceSpecConfig
from spmd_rl.model.size import ModelSize


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Peak rates of one device."""

    flops: float
    """Dense floating-point operations per second in the compute dtype"""
    memory_bandwidth: float
    """Bytes per second between the device and its memory"""


def _from_data_sheet(teraflops: float, memory_tb: float) -> DeviceSpec:
    """Return the attainable part of a data sheet's figures: 0.8 of the arithmetic in matrix products, 0.9 of the
    memory's bandwidth in streams (790 TFLOP/s and 4.3 TB/s on H200).
    """
    return DeviceSpec(0.8e12 * teraflops, 0.9e12 * memory_tb)


KNOWN_DEVICES = {
    "NVIDIA A100-SXM4-80GB": _from_data_sheet(312, 2.039),
    "NVIDIA H100 80GB HBM3": _from_data_sheet(989.4, 3.35),
    "NVIDIA H200": _from_data_sheet(989.4, 4.8),
    "NVIDIA B200": _from_data_sheet(2250, 8.0),
    "AMD Instinct MI300X": _from_data_sheet(1307.4, 5.3),
}
"""Devices by their driver's name, from the vendors' data sheets: dense bfloat16 without sparsity, HBM"""


def find_device_spec(settings: DeviceSpecConfig, device: torch.device, dtype: str) -> DeviceSpec | None:
    """Return the rates of `settings`, completed by those of a known device in bfloat16; None if one is unknown."""
    name = "" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    known = KNOWN_DEVICES.get(name) if dtype == "bfloat16" else None
    flops = settings.flops or (known and known.flops)
    memory = settings.memory_bandwidth or (known and known.memory_bandwidth)
    return DeviceSpec(flops, memory) if flops and memory else None


class TokenCounts(NamedTuple):
    """Counts of the tokens of some groups of answers, over all ranks."""

    prompts: int
    """Tokens that are read and not sampled; those that the answers of a group share count once"""
    sampled: int
    longest: int
    """Sampled tokens of the longest answer"""
    attended: float
    """Tokens that the sampled ones attend to, summed: P R + R^2 / 2 for an answer of R tokens to a prompt of P"""
    attended_by_prompts: float
    """Tokens that the prompts' own attend to, summed: P^2 / 2"""

    @classmethod
    def of(cls, groups: Iterable[Sequence[tuple[int, int, int]]]) -> "TokenCounts":
        """Count groups of answers, each given by the tokens of its prompt, its sampled tokens and all of its tokens.

        The third number exceeds the sum of the others if there are tokens between the turns of an answer.
        """
        prompts = sampled = longest = 0
        attended = attended_by_prompts = 0.0
        for group in groups:
            shared = max((prompt for prompt, _, _ in group), default=0)
            prompts += shared + sum(total - prompt - own for prompt, own, total in group)
            attended_by_prompts += shared * shared / 2
            for prompt, own, _ in group:
                sampled += own
                longest = max(longest, own)
                attended += prompt * own + own * own / 2
        return cls(prompts, sampled, longest, attended, attended_by_prompts)

    def flops(self, size: ModelSize) -> tuple[float, float]:
        """Return the operations of a forward pass over the tokens that are read, and over the sampled ones.

        A token costs two operations for each weight that it uses (Kaplan et al., arXiv 2001.08361, section 2.1), and
        four for each number of a head of each token it attends to: a product with its key and one with its value.
        """
        prompts = 2 * size.per_token * self.prompts + 4 * size.attention * self.attended_by_prompts
        return prompts, 2 * (size.per_token + size.head) * self.sampled + 4 * size.attention * self.attended


class ModelPasses(NamedTuple):
    """Passes of a step over one model, apart from generation."""

    size: ModelSize
    forwards: int
    """Passes without gradients: old logprobs, the reference's logprobs, the critic's values"""
    epochs: int
    """Passes with gradients: one for each epoch over the samples, with any number of optimizer steps"""


class Devices(NamedTuple):
    """The devices that share the work of a step."""

    ranks: int
    tp: int
    """Ranks that hold one copy of the engine"""
    itemsize: int
    """Bytes of a weight in the engine, and of a number in its KV cache"""


def roofline(
    generated: TokenCounts,
    trained: TokenCounts,
    policy: ModelSize,
    passes: Sequence[ModelPasses],
    devices: Devices,
    spec: DeviceSpec,
) -> dict[str, float]:
    """Return the least seconds of `generate`, `logprobs` and `train`, named as in `time/*`."""
    flops = spec.flops * devices.ranks
    one_pass = [sum(trained.flops(p.size)) / flops for p in passes]
    return {
        "generate": generate_seconds(generated, policy, devices, spec),
        "logprobs": sum(p.forwards * seconds for p, seconds in zip(passes, one_pass, strict=True)),
        # The backward pass computes one product for the weights' gradient and one for the input's.
        "train": sum(3 * p.epochs * seconds for p, seconds in zip(passes, one_pass, strict=True)),
    }


def generate_seconds(tokens: TokenCounts, size: ModelSize, devices: Devices, spec: DeviceSpec) -> float:
    """Return the seconds of prefill and decode.

    With W bytes of weights, k bytes of KV cache a token, and G devices of F operations and B bytes a second:

    prefill = prompt operations / (G F)
    decode = max(longest W / (tp B) + k attended / (G B), answer operations / (G F))
    """
    prefill, decode = (operations / (spec.flops * devices.ranks) for operations in tokens.flops(size))
    weights = tokens.longest * size.read / devices.tp
    cache = size.kv * tokens.attended / devices.ranks
    return prefill + max((weights + cache) * devices.itemsize / spec.memory_bandwidth, decode)
