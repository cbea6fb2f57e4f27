"""One gradient however samples are ordered, split into micro-batches, packed or padded: every loss and aggregation.

The model is the smallest that has per-tensor gradients: an embedding and a linear layer in place of a language model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spmd_rl.algo import AGGREGATIONS, POLICY_LOSSES, POLICY_TERMS
from spmd_rl.algo.correction import CORRECTION_LEVELS, correction
from spmd_rl.algo.inputs import Tokens
from tests.unit.algo.cases import KEYS

ALL = POLICY_LOSSES | POLICY_TERMS
VOCABULARY, WIDTH, SAMPLES = 13, 7, 7
CONSTANTS = {"seq-mean-token-sum-norm": {"loss_agg_length": 16}}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Row:
    """A prompt and turns of sampled tokens between others: `ids` int64 [T], `sampled` bool [T], then one entry a token.

    The old policy's logprobs are those of the tiny model, moved by noise: fixed numbers.
    """

    ids: Tensor
    sampled: Tensor
    old: Tensor
    engine: Tensor
    advantages: Tensor
    turns: Tensor
    marked: Tensor


class TinyLM(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = np.random.default_rng(5)
        self.embed = nn.Parameter(torch.tensor(rng.normal(0, 1, (VOCABULARY, WIDTH)), dtype=dtype))
        self.head = nn.Parameter(torch.tensor(rng.normal(0, 0.5, (VOCABULARY, WIDTH)), dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(rng.normal(0, 0.5, VOCABULARY), dtype=dtype))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logprob of each id but the first, and the entropy there; the last axis of `ids` is time."""
        logs = torch.log_softmax(torch.tanh(self.embed[ids[..., :-1]]) @ self.head.T + self.bias, -1)
        return logs.gather(-1, ids[..., 1:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def build_row(rng: np.random.Generator, turns: list[tuple[int, int]], advantage: float, drift: float) -> Row:
    """`turns`: tokens given and tokens sampled, of each turn."""
    sampled = np.concatenate([np.repeat([False, True], turn) for turn in turns])
    ids = torch.tensor(rng.integers(0, VOCABULARY, len(sampled)))
    with torch.no_grad():
        logprobs = TinyLM(torch.float64)(ids)[0].numpy()[sampled[1:]]
    old = logprobs - rng.normal(drift, 0.3, len(logprobs))
    return Row(
        ids=ids,
        sampled=torch.tensor(sampled),
        old=torch.tensor(old),
        engine=torch.tensor(old + rng.normal(0, 0.2, len(old))),
        advantages=torch.full((len(old),), advantage, dtype=torch.float64),
        turns=torch.tensor(np.cumsum(~sampled)[sampled]),
        marked=torch.tensor(rng.uniform(0, 1, len(old)) < 0.2),
    )


def build_rows() -> list[Row]:
    rng = np.random.default_rng(11)
    advantages = [0.7, -1.1, 0.0, 1.6, -0.4, 0.9, -0.8]
    drifts = [0.05, -0.04, 0.0, 0.03, 0.3, 0.02, -0.02]
    turns = [[(2 + turn, int(rng.integers(1, 9))) for turn in range(1 + i % 3)] for i in range(SAMPLES)]
    return [build_row(rng, *columns) for columns in zip(turns, advantages, drifts, strict=True)]


ROWS = build_rows()
LENGTHS = torch.tensor([len(row.old) for row in ROWS])
IDLE = build_row(np.random.default_rng(12), [(1, 3)], advantage=3.0, drift=0.1)
"""A sample of weight 0, as a rank runs when it has fewer micro-batches than others."""


def tokens(model: TinyLM, rows: list[Row], padded: bool) -> Tokens:
    """A micro-batch: a padded rectangle, or all samples in one line (where what crosses a border is not sampled)."""
    dtype = model.head.dtype
    if padded:
        logprobs, entropy = model(nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True))
        mask = nn.utils.rnn.pad_sequence([row.sampled for row in rows], batch_first=True)[:, 1:]
    else:
        logprobs, entropy = model(torch.cat([row.ids for row in rows]))
        mask = torch.cat([row.sampled for row in rows])[1:]
    return Tokens(
        logprobs=logprobs[mask],
        old_logprobs=torch.cat([row.old for row in rows]).to(dtype),
        rollout_logprobs=torch.cat([row.engine for row in rows]).to(dtype),
        advantages=torch.cat([row.advantages for row in rows]).to(dtype),
        entropy=entropy[mask],
        samples=torch.cat([torch.full_like(row.turns, i) for i, row in enumerate(rows)]),
        segments=torch.cat([row.turns + 1000 * i for i, row in enumerate(rows)]),
        marked=torch.cat([row.marked for row in rows]),
        right=torch.cat([row.advantages.clamp(min=0) for row in rows]).to(dtype),
    )


def gradients(
    name: str, aggregation: str, batches: list[list[int]], padded: bool, dtype: torch.dtype, level: str | None = None
) -> dict[str, Tensor]:
    """Gradient of the whole batch, accumulated over the micro-batches; -1 stands for the sample of weight 0."""
    weights = AGGREGATIONS[aggregation](LENGTHS, **CONSTANTS.get(aggregation, {}))
    model = TinyLM(dtype)
    for batch in batches:
        rows = [ROWS[i] if i >= 0 else IDLE for i in batch]
        data = tokens(model, rows, padded)
        per_sample = torch.stack([weights[i] if i >= 0 else weights.new_zeros(()) for i in batch])
        loss, _ = ALL[name](data, **KEYS[name])
        if level:
            loss = loss * correction(data, level=level, upper=1.2, mask_low=0.7, mask_high=1.5)[0]
        (loss * per_sample.to(dtype)[data.samples]).sum().backward()
    return {key: p.grad for key, p in model.named_parameters()}


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor], limit: float) -> None:
    for key, grad in reference.items():
        norm = torch.linalg.vector_norm(grad)
        assert norm > 1e-3, f"{key} has no gradient to speak of"
        assert torch.linalg.vector_norm(ours[key] - grad) <= limit * norm, key


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], bool]:
    """Any order, any cut into micro-batches of whole samples, packed or padded, with samples of weight 0 among them."""
    order = draw(st.permutations(list(range(SAMPLES)) + [-1] * draw(st.integers(0, 2))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1))))
    edges = [0, *cuts, len(order)]
    return [order[a:b] for a, b in zip(edges, edges[1:])], draw(st.booleans())


REFERENCES: dict[tuple, dict[str, Tensor]] = {}


def reference(name: str, aggregation: str, dtype: torch.dtype, level: str | None = None) -> dict[str, Tensor]:
    """All samples in one packed micro-batch, in order."""
    key = (name, aggregation, dtype, level)
    if key not in REFERENCES:
        REFERENCES[key] = gradients(name, aggregation, [list(range(SAMPLES))], False, dtype, level)
    return REFERENCES[key]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are tiny; threads that wait for each other would cost a hundred times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(ALL))
@settings(max_examples=8, derandomize=True, deadline=None, database=None)
@given(layout=layouts())
def test_the_gradient_does_not_know_the_layout(name: str, aggregation: str, dtype: torch.dtype, layout) -> None:
    batches, padded = layout
    assert_same(
        gradients(name, aggregation, batches, padded, dtype), reference(name, aggregation, dtype), LIMITS[dtype]
    )


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("level", list(CORRECTION_LEVELS))
@settings(max_examples=8, derandomize=True, deadline=None, database=None)
@given(layout=layouts())
def test_the_correction_does_not_know_the_layout(level: str, dtype: torch.dtype, layout) -> None:
    batches, padded = layout
    ours = gradients("ppo_clip", "token-mean", batches, padded, dtype, level)
    assert_same(ours, reference("ppo_clip", "token-mean", dtype, level), LIMITS[dtype])


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_every_sample_counts(name: str) -> None:
    """The property above would hold for a loss that ignores its data: here each sample moves the gradient."""
    whole = reference(name, "token-mean", torch.float64)
    unmoved = []
    for i in range(SAMPLES):
        rest = gradients(name, "token-mean", [[j for j in range(SAMPLES) if j != i]], False, torch.float64)
        if max(float((rest[key] - grad).abs().max()) for key, grad in whole.items()) < 1e-6:
            unmoved.append(i)
    without = {i for i, row in enumerate(ROWS) if row.advantages[0] == 0 and name not in ("kimi", "kl_cov")}
    negative = {i for i, row in enumerate(ROWS) if row.advantages[0] < 0 and name == "raft_pp"}
    beyond = {1, 5} if name in ("gspo", "gspo_token") else set()  # the whole sample is outside the band
    assert set(unmoved) == without | negative | beyond
