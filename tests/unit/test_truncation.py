"""Sampling among the tokens that top-k, top-p and min-p leave: which, how often, what is recorded. Stop strings."""

from array import array

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spmd_rl.base.errors import UserError
from spmd_rl.batch import pack
from spmd_rl.config.schema import EvalConfig, RolloutConfig
from spmd_rl.engine.native.sampling import sample_truncated, uniform
from spmd_rl.engine.sequence import SequenceState, has_stop
from spmd_rl.types import CandidateIds, Request, Sample, Turn, Verdict

CUTS = [(3, 1.0, 0.0), (12, 0.7, 0.0), (12, 1.0, 0.2), (5, 0.8, 0.1), (1, 0.5, 0.9), (99, 1.0, 0.0), (12, 1e-9, 0.0)]
"""top_k, top_p, min_p"""


def draw(logits, temperature, uniforms, top_k, top_p, min_p):
    rows = len(uniforms)
    doubles = (torch.full((rows,), value, dtype=torch.float64) for value in (top_p, min_p))
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    top_k = torch.full((rows,), top_k)
    return sample_truncated(logits.expand(rows, -1), torch.full((rows,), temperature), uniforms, top_k, *doubles)


def truncated(logits, top_k, top_p, min_p):
    """Probabilities of the truncated and renormalised distribution, by transformers in vLLM's order: float64 [V]."""
    logits = logits.double()[None]
    logits = MinPLogitsWarper(min_p)(None, logits) if min_p else logits
    logits = TopKLogitsWarper(top_k)(None, logits)
    return (TopPLogitsWarper(top_p)(None, logits) if top_p < 1 else logits)[0].softmax(-1)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_frequencies_survivors_and_logprobs_are_those_of_the_truncated_distribution(cut, temperature):
    logits = 1.5 * torch.randn(12, generator=torch.Generator().manual_seed(4))
    num = 20_000
    tokens, logprobs, candidate_ids = draw(logits, temperature, [uniform(5, i) for i in range(num)], *cut)
    wanted = truncated(logits / temperature, *cut)
    assert candidate_ids == [wanted.nonzero().flatten().tolist()] * num
    torch.testing.assert_close(logprobs.double(), wanted[tokens].log(), atol=1e-6, rtol=1e-6)
    observed, expected = torch.bincount(tokens, minlength=12).double(), num * wanted
    assert observed[wanted == 0].sum() == 0
    error = (observed - expected).abs() / (expected * (1 - wanted)).clamp(min=1e-9).sqrt()
    assert error[wanted > 0].max() < 5  # standard deviations


def test_rows_do_not_see_each_other():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    temperatures, uniforms = torch.linspace(0.5, 2, 5), torch.linspace(0, 0.999, 5, dtype=torch.float64)
    settings = [torch.tensor([4, 300, 50, 9, 1])]
    settings += [torch.tensor(column, dtype=torch.float64) for column in ([1, 0.5, 0.9, 1, 1], [0, 0, 0.01, 0.1, 0])]
    tokens, logprobs, candidate_ids = sample_truncated(logits, temperatures, uniforms, *settings)
    for row in range(5):
        one = slice(row, row + 1)
        alone = sample_truncated(logits[one], temperatures[one], uniforms[one], *[column[one] for column in settings])
        assert (alone[0].item(), alone[1].item(), alone[2][0]) == (tokens[row], logprobs[row], candidate_ids[row])


def test_a_nan_is_reported():
    assert draw(torch.full((9,), torch.nan), 1.0, [0.5], 4, 0.9, 0.0)[1].isnan().all()


def answer(prompt=(), ids=(), num_begun=0, stop=("</a>", "##")) -> SequenceState:
    request = Request("a", array("i", list(prompt)), 9, 1.0, 0, stop=stop, num_begun=num_begun)
    return SequenceState(request, array("i", list(ids)))


def test_a_stop_string_is_seen_wherever_it_lies_in_the_answer_and_not_before_it():
    def text_of(ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def stops(prompt, text, **settings):
        return has_stop(answer(prompt.encode(), text.encode(), **settings), text_of)

    assert stops("x", "long before </a>") and stops("x", "#" * 2) and not stops("x", "</ a>")
    assert not stops("</a", ">") and not stops("</a>", "b")  # not the model's own words
    assert stops("</a", ">", num_begun=3) and stops("x</a", ">", num_begun=2) is False
    assert not stops("x", "</a>", stop=())
    assert stops("x", "\u00e9</a>") and stops("x", "\u00e9", stop=("\u00e9",))


def test_survivors_travel_in_a_batch():
    def turn(given, sampled, lists):
        counts, ids = array("i", map(len, lists)), array("i", [id for ids in lists for id in ids])
        versions, logprobs = array("i", [0] * len(sampled)), array("f", [-1.0] * len(sampled))
        parts = (array("i", given), array("i", sampled), logprobs, versions, "stop", "")
        return Turn(*parts, CandidateIds(counts, ids) if lists else None)

    turns = turn([9, 9], [1, 2], [[1, 5], [2]]), turn([9], [3], [[0, 3, 7]])
    samples = [Sample(0, 0, turns, Verdict("ok")), Sample(0, 1, (turn([9], [4, 4], []),), Verdict("ok"))]
    batch = pack(samples, truncated=True).select([1, 0])
    lists = np.split(batch.candidate_ids.values.numpy(), batch.candidate_ids.offsets[1:-1])
    assert [one.tolist() for one in lists] == [[], [], [], [], [], [1, 5], [2], [], [0, 3, 7]]
    assert batch.candidate_ids.owners.tolist() == [5, 5, 6, 8, 8, 8]
    assert pack(samples).candidate_ids is None and pack([], truncated=True).candidate_ids.values.numel() == 0


def test_settings():
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert RolloutConfig().truncation == RolloutConfig(top_k=-1).truncation == off
    assert RolloutConfig(top_p=0.9).truncation == off | {"top_k": 256, "top_p": 0.9}
    assert RolloutConfig(top_k=20, min_p=0.1).truncation == off | {"top_k": 20, "min_p": 0.1}
    assert EvalConfig().truncation(RolloutConfig(top_k=20)) == off | {"top_k": 20}
    assert EvalConfig(top_k=-1, top_p=0.8).truncation(RolloutConfig(top_k=20)) == off | {"top_k": 256, "top_p": 0.8}
    assert RolloutConfig(stop=["a", "\\n\\n"]).stop_strings == ("a", "\n\n")
    with pytest.raises(UserError, match="^stop: an empty text"):
        RolloutConfig(stop=["x", ""])
    for key, value in (("top_k", 1025), ("top_k", 1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("min_p", -0.1)):
        with pytest.raises(UserError, match=f"^{key}: "):
            RolloutConfig(**{key: value})
