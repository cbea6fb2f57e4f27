"""Hybrid models: packed rows and the native engine against plain transformers, each sequence alone."""

from array import array
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.config.architectures import HYBRID
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.model.hybrid import Segments
from spmd_rl.types import Request
from tests.engines import answers
from tests.zoo import write

LENGTHS = (1, 2, 3, 5, 17, 40, 70, 70)
"""Prompt lengths below and above a convolution's width and a chunk of the recurrence."""
OTHER_CHUNKS = 5e-5
"""Tolerance where a recurrence is cut elsewhere, or computed token by token. With these large random weights, the
logprobs of transformers' own chunks of 16, 32, 64, 128 tokens and of its recurrence differ by 1.7e-5 to 6.6e-5."""


@pytest.fixture(scope="module", params=HYBRID)
def model(request, tmp_path_factory):
    """A directory with a small random hybrid model, and the model of plain transformers."""
    path = tmp_path_factory.mktemp(request.param)
    write(request.param, path)
    yield path, AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def tolerance(plain, is_cut: bool) -> float:
    """Tolerance of a logprob; convolutions round alike wherever a sequence is cut."""
    return OTHER_CHUNKS if is_cut and "linear_attention" in plain.config.layer_types else 1e-5


def prompt(length: int, seed: int) -> array:
    """Random token ids."""
    return array("i", torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def logprobs(model, ids: list[int]) -> Tensor:
    """Logprob of each token but the first, float32 [T - 1]."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


TREES = {
    "neighbours": ([5, 40, 1, 70, 33], [-1, -1, -1, -1, -1]),
    "group": ([20, 7, 90, 1, 64], [-1, 0, 0, 0, -1]),
    "trajectory": ([3, 10, 2, 30, 5, 66], [-1, 0, 1, 1, 0, 4]),
    "chunks": ([64, 63, 1, 2, 130, 200, 64, 5], [-1, 0, 1, 2, 1, 0, 5, 6]),
}
"""Lengths of segments and their parents"""


@pytest.mark.parametrize("tree", TREES)
def test_a_packed_row_has_the_logprobs_and_gradients_of_its_sequences_alone(model, tree):
    path, plain = model
    lengths, parents = TREES[tree]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    spans = [list(range(*pair)) for pair in pairwise(starts.tolist())]
    row = torch.tensor(prompt(int(starts[-1]), 0).tolist())
    paths = []
    for number, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + spans[number])
    positions = torch.cat([torch.arange(len(path))[-n:] for path, n in zip(paths, lengths, strict=True)])
    ours = build_model(path, torch.float32, "cpu")
    hidden = ours.model(
        input_ids=row[None], position_ids=positions[None], use_cache=False,
        packing=Packing.of(starts, torch.tensor(parents)),
        seq_idx=Segments.of(starts, torch.tensor(parents), torch.device("cpu")),
    ).last_hidden_state[0]  # fmt: skip
    logits, total, wanted = ours.lm_head(hidden).log_softmax(-1), 0.0, 0.0
    for number, path_of in enumerate(paths):
        if number in parents or len(path_of) < 2:
            continue
        ids = row[path_of]
        found = logits[path_of[:-1]].gather(-1, ids[1:, None])[:, 0]
        expected = logprobs(plain, ids.tolist())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        total, wanted = total + found.sum(), wanted + expected.sum()
    gradients, theirs = (
        torch.autograd.grad(loss, list(one.parameters()), allow_unused=True)
        for loss, one in ((total, ours), (wanted, plain))
    )
    scale = max(float(g.abs().max()) for g in theirs if g is not None)
    for found, expected in zip(gradients, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=0)


def engine_of(path, plain) -> NativeEngine:
    """A native engine that holds the model's weights."""
    engine = NativeEngine(empty_module(path, torch.float32), max_running=5, kv_tokens=1024)
    engine.load(stored(path).items(), version=1)
    return engine


def stored(path) -> dict[str, Tensor]:
    """Weights under their stored names."""
    return load_file(path / "model.safetensors")


def test_the_native_engine_samples_with_the_logprobs_of_a_full_forward(model):
    path, plain = model
    requests = [Request(str(n), prompt(length, n), 12 + n, 1.0, n) for n, length in enumerate(LENGTHS)]
    # An equal prompt, as the answers of a group have.
    requests.append(Request("twin", requests[-1].prompt_ids, 9, 1.0, 99))
    engine = engine_of(path, plain)
    done = answers(engine, *requests)
    for request in requests:
        completion, first = done[request.id], len(request.prompt_ids) - 1
        with torch.no_grad():
            expected = logprobs(plain, [*request.prompt_ids, *completion.token_ids])[first:]
        atol = tolerance(plain, is_cut=True)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=0)
    # The same requests again: the same bits, since nothing was cached.
    assert answers(engine, *requests) == done and engine.token_counts.cached == 0


def test_an_interrupted_answer_goes_on_as_it_would_have(model):
    path, plain = model
    engine = engine_of(path, plain)
    whole = answers(engine, Request("a", prompt(9, 1), 20, 1.0, 5))["a"]
    begun = whole.token_ids[:8]
    rest = answers(engine, Request("a", prompt(9, 1) + begun, 12, 1.0, 5, num_begun=8))["a"]
    assert rest.token_ids == whole.token_ids[8:]
