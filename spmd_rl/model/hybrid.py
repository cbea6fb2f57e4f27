"""Hybrid models: layers whose state carries over from token to token, in packed rows.

    keep_apart(module)                                               # once, after building
    module(..., packing=..., seq_idx=Segments.of(starts, parents))   # transformers hands `seq_idx` to these layers

Gated delta nets and short convolutions read no attention mask: in a packed row, a sequence would continue its
neighbour. Here each segment starts from the final state of its parent, or from none, so common prefixes are computed
once and their gradients add up. transformers' own layer computes; its state goes through a cache, as in generation.

Left out: ranks that split a row (`cp`) or the layers' heads (`tp`).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.config.architectures import STATES

ROUND = 64
"""Multiple of the padded lengths of segments: kernels are cached per shape."""


class Mixing(Protocol):
    """The division of a row's tokens among calls of a layer."""

    def mix(self, call: "Call", layer: int, hidden: Tensor) -> Tensor:
        """Return the outputs of layer number `layer` for hidden states [1, T, H]: [1, T, H]."""
        ...


class LayerState:
    """State of one layer for R rows, like transformers' caches. Never changed in place, so gradients flow through."""

    record_past = True
    """Tells the layer to update its state through the methods below, for one token too"""

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """conv: last inputs of the convolution [R, channels, kernel]. recurrent: [R, heads, ..], None without one."""
        # Layers of a model with one state each have number 0.
        self.conv_states, self.recurrent_states = {0: conv}, {0: recurrent}

    @classmethod
    def joined(cls, states: Sequence["RowState"]) -> "LayerState":
        """Join states of one row each; none gives an empty state."""
        columns = zip(*states, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))

    @property
    def tensors(self) -> "RowState":
        """State of the convolution, and the recurrent one."""
        return self.conv_states[0], self.recurrent_states[0]

    @property
    def layers(self) -> "_Always":
        """States by layer number, always this one."""
        return _Always(self)

    def has_previous_state(self, layer: int = 0, state_idx: int = 0) -> bool:
        """Return True if there is a state to continue."""
        return self.conv_states[0] is not None

    def update_conv_state(self, new: Tensor, layer: int, conv_kernel_size: int, state_idx: int = 0) -> Tensor:
        """Prepend the kept inputs to [R, channels, T], and keep the last ones."""
        old = self.conv_states[0]
        full = new if old is None else torch.cat([old, new], -1)
        self.conv_states[0] = F.pad(full, (max(0, conv_kernel_size - full.shape[-1]), 0))[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(self, new: Tensor, layer: int, state_idx: int = 0) -> Tensor:
        """Keep a new recurrent state and return it."""
        self.recurrent_states[0] = new
        return new


@dataclass(frozen=True, slots=True)
class _Always:
    """A sequence whose every element is the same."""

    element: Any

    def __getitem__(self, index: int) -> Any:
        return self.element


RowState = tuple[Tensor | None, Tensor | None]
"""State of a layer for one row: of the convolution, and the recurrent one."""
Call = Callable[[Tensor, LayerState | None], Tensor]
"""A layer's forward: hidden states [R, T, H] and their state -> [R, T, H]"""


@dataclass(frozen=True, slots=True)
class _Part:
    """Segments of one call of a layer."""

    tokens: Tensor
    """int64 [R, L]: tokens of the row, padded on the right by the first"""
    own: Tensor
    """bool [R, L]: tokens that are not padding"""
    parents: tuple[int, ...]
    """segment that each row continues; empty: none does"""
    fork: int
    """segment that others continue, -1 for none"""


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of one packed row: a forest, parents before children. See `sharing.PrefixTree`."""

    parts: tuple[_Part, ...]
    order: Tensor
    """int64 [T]: index of each token of the row among the tokens of the parts"""
    keeps: bool
    """True if a segment has a parent"""

    @classmethod
    def of(cls, starts: Tensor, parents: Tensor, device: torch.device) -> "Segments":
        """Return segments from the first token of each, then T (int64 [P+1]), and their parents (int64 [P])."""
        runs, before = [range(*pair) for pair in pairwise(starts.tolist())], parents.tolist()
        parts = [_part(rows, runs, before, fork) for rows, fork in _batches(runs, before)]
        order = torch.cat([part.tokens[part.own] for part in parts]).argsort()
        moved = [_Part(p.tokens.to(device), p.own.to(device), p.parents, p.fork) for p in parts]
        return cls(tuple(moved), order.to(device), any(parent >= 0 for parent in before))

    def mix(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Return outputs for the row: [1, T, H]."""
        states: dict[int, RowState] = {}
        found = []
        for part in self.parts:
            state = LayerState.joined([states[parent] for parent in part.parents]) if self.keeps else None
            found.append(call(hidden[0, part.tokens], state)[part.own])
            if part.fork >= 0:
                states[part.fork] = state.tensors
        return torch.cat(found)[self.order][None]


def _batches(runs: Sequence[range], parents: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield the segments of each part, with the one that others continue, or -1."""
    forks = {parent for parent in parents if parent >= 0}
    # Padding would change a final state that others continue, so these go alone.
    yield from (([fork], fork) for fork in sorted(forks))
    alike: dict[tuple[bool, int], list[int]] = {}
    for segment, parent in enumerate(parents):
        if segment not in forks:
            # Lengths within a factor of two share a part.
            alike.setdefault((parent >= 0, (len(runs[segment]) - 1).bit_length()), []).append(segment)
    yield from ((rows, -1) for rows in alike.values())


def _part(rows: list[int], runs: Sequence[range], parents: Sequence[int], fork: int) -> _Part:
    longest = max(len(runs[row]) for row in rows)
    length = longest if fork >= 0 else -(-longest // ROUND) * ROUND
    lengths = torch.tensor([len(runs[row]) for row in rows])
    places = torch.arange(length).expand(len(rows), length)
    own = places < lengths[:, None]
    tokens = torch.tensor([runs[row].start for row in rows])[:, None] + places * own
    return _Part(tokens, own, tuple(parents[row] for row in rows if parents[row] >= 0), fork)


def stateful_layers(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a transformers model that carry a state, such as `linear_attn` of a decoder layer."""
    return [part for part in module.modules() if getattr(part, "layer_type", None) in STATES]


def keep_apart(module: nn.Module) -> None:
    """Let layers with a state divide their rows by `seq_idx`, a `Mixing`."""
    for part in stateful_layers(module):
        part.forward = partial(_mix, part.forward, part.layer_idx, _state_argument(part))


def _state_argument(part: nn.Module) -> str:
    names = inspect.signature(part.forward).parameters
    return next(name for name in ("cache_params", "past_key_values") if name in names)


def _mix(
    forward: Callable[..., Tensor], layer: int, argument: str, hidden_states: Tensor, *, seq_idx: Mixing, **_: Any
) -> Tensor:
    return seq_idx.mix(lambda hidden, state: forward(hidden, **{argument: state}), layer, hidden_states)
