"""Hybrid models: layers whose state carries over from token to token, in packed rows.

    keep_apart(module)                                               # once, after building
    module(..., packing=..., seq_idx=Segments.of(starts, parents))   # transformers hands `seq_idx` to these layers

Gated delta nets and short convolutions read no attention mask: in a packed row, a sequence would continue its
neighbour. Here each segment starts from an ancestor's state, or from none, so common prefixes are computed once, but
for their last tokens, and gradients add up. transformers' own layer computes; its state goes through a cache.

Left out: ranks that split a row (`cp`) or the layers' heads.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.config.architectures import STATES

CHUNK = 64
"""Tokens of a chunk of a recurrence; calls are padded to whole ones"""


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
    """Sequences of one call of a layer."""

    tokens: Tensor
    """int64 [R, L]: tokens of the row, padded on the right by the first"""
    own: Tensor
    """bool [R, L]: tokens whose outputs are these"""
    after: tuple[int, ...]
    """token whose state each sequence continues; empty: none does"""
    kept: int = -1
    """token whose state others continue, the last of all; -1 for none"""


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of one packed row: a forest, parents before children. See `sharing.PrefixTree`."""

    parts: tuple[_Part, ...]
    order: Tensor
    """int64 [T]: index of each token of the row among the tokens of the parts"""

    @classmethod
    def of(cls, starts: Tensor, parents: Tensor, device: torch.device) -> "Segments":
        """Return segments from the first token of each, then T (int64 [P+1]), and their parents (int64 [P])."""
        before, stretches = parents.tolist(), list[_Stretch]()
        forks = set(before)
        # Of each segment the place in its sequence at which it ends, and the sequence's last tokens.
        ends: list[tuple[int, list[int]]] = []
        for (begin, end), parent in zip(pairwise(starts.tolist()), before, strict=True):
            first, last = ends[parent] if parent >= 0 else (0, [])
            own = [*range(begin, end)]
            stretches += _stretches(first, last, own, len(ends) in forks)
            ends.append((first + len(own), (last + own)[-CHUNK:]))
        parts = [_part([stretch]) for stretch in stretches if stretch.is_kept]
        alike: dict[tuple[bool, int], list[_Stretch]] = {}
        for stretch in stretches:
            if not stretch.is_kept:
                # Lengths within a factor of two share a part.
                alike.setdefault((stretch.after >= 0, (len(stretch.tokens) - 1).bit_length()), []).append(stretch)
        parts += map(_part, alike.values())
        order = torch.cat([part.tokens[part.own] for part in parts]).argsort()
        moved = [_Part(p.tokens.to(device), p.own.to(device), p.after, p.kept) for p in parts]
        return cls(tuple(moved), order.to(device))

    def mix(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Return outputs for the row: [1, T, H]."""
        states: dict[int, RowState] = {}
        found = []
        for part in self.parts:
            has_state = part.after or part.kept >= 0
            state = LayerState.joined([states[token] for token in part.after]) if has_state else None
            found.append(call(hidden[0, part.tokens], state)[part.own])
            if part.kept >= 0:
                states[part.kept] = state.tensors
        return torch.cat(found)[self.order][None]


class _Stretch(NamedTuple):
    """Tokens of a sequence for one call."""

    tokens: list[int]
    num_lead: int
    """first tokens, which are an ancestor's"""
    after: int
    """token whose state they continue, or -1"""
    is_kept: bool = False
    """True if others continue their last token's state"""


def _stretches(first: int, last: list[int], own: list[int], is_parent: bool) -> Iterator[_Stretch]:
    """Yield the calls of a segment with tokens `own`, at place `first` of a sequence after tokens `last`."""
    # They begin where a sequence alone ends a chunk, so that a recurrence groups its sums alike; the ancestors' tokens
    # since then are computed again.
    num_lead, end = first % CHUNK, first + len(own)
    begin, cut = first - num_lead, end - end % CHUNK
    lead, after = last[len(last) - num_lead :], last[-num_lead - 1] if begin else -1
    if is_parent and cut > begin:
        yield _Stretch(lead + own[: cut - first], num_lead, after, is_kept=True)
        lead, own, after = [], own[cut - first :], own[cut - first - 1]
    if own:
        yield _Stretch(lead + own, len(lead), after)


def _part(stretches: Sequence[_Stretch]) -> _Part:
    lengths, is_kept = [len(stretch.tokens) for stretch in stretches], stretches[0].is_kept
    # Padding would change a final state that others continue, and these have whole chunks.
    length = -(-max(lengths) // CHUNK) * CHUNK
    tokens = torch.tensor([one.tokens + one.tokens[:1] * (length - len(one.tokens)) for one in stretches])
    places, leads = torch.arange(length), torch.tensor([stretch.num_lead for stretch in stretches])
    own = (places >= leads[:, None]) & (places < torch.tensor(lengths)[:, None])
    after = tuple(stretch.after for stretch in stretches if stretch.after >= 0)
    return _Part(tokens, own, after, stretches[0].tokens[-1] if is_kept else -1)


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
