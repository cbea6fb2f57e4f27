"""Divergences over k tokens and all others against plain ones over the whole vocabulary, with their gradients."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spmd_rl.algo.distillation import DIVERGENCES, distillation
from spmd_rl.config.sections.teachers import DIVERGENCES as NAMES
from spmd_rl.config.vocabulary import difference
from spmd_rl.model import logprobs as room
from spmd_rl.model.logprobs import token_logprobs, top_logprobs

N, V, H = 7, 23, 5


def plain(name: str, t: torch.Tensor, s: torch.Tensor, mix: float) -> torch.Tensor:
    """From the definitions, in probabilities."""

    def kl(p, q):
        return (p * (p / q).log()).sum(-1)

    forms = {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "skewed_kl": lambda: kl(t, mix * t + (1 - mix) * s),
        "skewed_reverse_kl": lambda: kl(s, mix * s + (1 - mix) * t),
        "jensen_shannon": lambda: mix * kl(t, mix * t + (1 - mix) * s) + (1 - mix) * kl(s, mix * t + (1 - mix) * s),
    }
    return forms[name]()


def logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed))


def merged(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of these tokens, and of all others as one."""
    some = p.gather(-1, ids)
    return torch.cat([some, 1 - some.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("k", [V, 6, 1])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_and_its_gradient_are_those_of_the_definition(name: str, k: int) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    ids = teacher.topk(k).indices
    found = distillation(name, *(F.log_softmax(x, -1).gather(-1, ids) for x in (teacher, student)), 0.3)
    t, s = (F.softmax(x.double(), -1) for x in (teacher, student))
    whole = plain(name, t, s, 0.3)
    wanted = whole if k == V else plain(name, merged(t, ids), merged(s, ids), 0.3)
    assert torch.allclose(found.double(), wanted, atol=3e-6)
    assert (wanted <= whole + 1e-12).all()  # merging outcomes never makes it greater
    (mine,), (theirs,) = (torch.autograd.grad(x.sum(), student) for x in (found, wanted))
    assert torch.allclose(mine, theirs, atol=1e-5) and mine.abs().max() > 0.01


def test_a_token_without_a_teacher_has_neither_loss_nor_gradient() -> None:
    student = F.log_softmax(logits(1), -1)[:, :4].requires_grad_()
    teacher = F.log_softmax(logits(0), -1)[:, :4].clone()
    teacher[2] = -torch.inf
    found = distillation("reverse_kl", teacher, student, 0.1)
    found.sum().backward()
    assert found[2] == 0 and not student.grad[2].any() and student.grad.isfinite().all() and student.grad[1].any()
    assert not distillation("forward_kl", teacher[:, :0], student[:, :0], 0.1).any()


def test_divergences_have_the_names_of_the_settings() -> None:
    assert tuple(DIVERGENCES) == NAMES


@pytest.mark.parametrize("chunk", [N * 4, 10**6], ids=["six chunks", "one chunk"])
def test_logprobs_of_several_tokens_and_the_most_likely_ones(monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(room, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, requires_grad=True)
    targets = torch.randint(0, V, (N, 4), generator=generator)
    factors = torch.randn(N, 4, generator=generator)
    found, entropy = token_logprobs(hidden, weight, targets, 0.7)
    whole = F.log_softmax(hidden @ weight.T / 0.7, -1)
    assert torch.allclose(found, whole.gather(1, targets), atol=1e-5)
    mine = torch.autograd.grad((found * factors).sum() + entropy.sum(), (hidden, weight))
    plain_loss = (whole.gather(1, targets) * factors).sum() - (whole.exp() * whole).sum()
    theirs = torch.autograd.grad(plain_loss, (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))
    one, _ = token_logprobs(hidden, weight, targets[:, 0], 0.7)
    assert torch.equal(one, found[:, 0])

    ids, best = top_logprobs(hidden, weight, 5, 0.7)
    wanted = whole.topk(5)
    assert torch.equal(ids, wanted.indices) and torch.allclose(best, wanted.values, atol=1e-5)
    ids, best = top_logprobs(hidden, weight, 5, 0.7, num_ids=9)
    assert torch.equal(ids, whole[:, :9].topk(5).indices) and torch.allclose(best, whole.gather(1, ids), atol=1e-5)


def directory(path: Path, tokens: list[str], added: str = "<end>") -> Path:
    path.mkdir()
    tree = {
        "model": {"vocab": {token: number for number, token in enumerate(tokens)}},
        "added_tokens": [{"id": len(tokens), "content": added}],
    }
    (path / "tokenizer.json").write_text(json.dumps(tree))
    (path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    return path


def test_vocabularies_that_differ_are_told_apart_by_an_id(tmp_path: Path) -> None:
    own, same = directory(tmp_path / "a", ["x", "y"]), directory(tmp_path / "b", ["x", "y"])
    (same / "config.json").write_text(json.dumps({"vocab_size": 128}))  # rows that are no token's are no difference
    assert difference(own, same) == difference(own, own) == ""
    assert difference(own, directory(tmp_path / "c", ["x", "z"])) == "id 1 is 'z' there and 'y' here (1 ids differ)"
    assert difference(own, directory(tmp_path / "d", ["x"])) == "id 1 is '<end>' there and 'y' here (2 ids differ)"
    (same / "tokenizer.json").unlink()
    assert difference(own, same) == "it has 128 ids there and 64 here"
