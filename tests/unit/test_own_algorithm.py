"""A loss and an advantage of a user's own, by `module:function`: their settings, their mistakes, and their values."""

import sys

import pytest
import torch

from spmd_rl.algo import ADVANTAGES, POLICY_LOSSES, TOKEN_ADVANTAGES
from spmd_rl.algo.inputs import Scored, Tokens
from spmd_rl.base.errors import UserError
from spmd_rl.config.algorithm_targets import check_algorithm, sources
from spmd_rl.config.run_identity import identity_hash
from spmd_rl.config.schema import AlgorithmConfig, RlvrConfig
from spmd_rl.config.unused import unread_algorithm_keys
from spmd_rl.learn.custom import answer_advantage, bind, policy_loss, token_advantage

MINE = """
from spmd_rl.algo.advantages.group import grpo
from spmd_rl.algo.advantages.tokens import reinforce_returns
from spmd_rl.algo.policy.clipped import ppo_clip
def clipped(tokens, *, clip_low, clip_high, strength=1.0):
    loss, metrics = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high)
    return strength * loss, metrics
def alone(tokens, clip_low): return clip_low * tokens.logprobs
def raising(tokens):
    total = tokens.logprobs.sum()
    return total.nothing
def mean(tokens): return tokens.logprobs.mean()
def greedy_of(tokens, *, temperature): return tokens.logprobs
def answers(scored, *, norm_std): return grpo(scored, norm_std=norm_std).float()
def tokens(rewards, values, samples, *, gamma): return reinforce_returns(rewards, values, samples, gamma=gamma)
def two(a, b): return a
"""
TOKENS = Tokens(
    logprobs=torch.tensor([-0.5, -1.0, -0.2], requires_grad=True),
    old_logprobs=torch.tensor([-0.9, -0.4, -0.2]),
    rollout_logprobs=torch.tensor([-0.9, -0.4, -0.2]),
    advantages=torch.tensor([1.0, 1.0, -1.0]),
    entropy=torch.zeros(3),
    samples=torch.tensor([0, 0, 1]),
    segments=torch.tensor([0, 0, 1]),
)
SCORED = Scored(torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.tensor([0, 0, 0, 1]), torch.tensor([3, 4, 5, 6]))


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_algorithm.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)
    return tmp_path / "my_algorithm.py"


def test_a_loss_gets_its_settings_and_counts_as_ours() -> None:
    settings = AlgorithmConfig(loss="my_algorithm:clipped", clip_high=0.3, args={"strength": 2.0})
    check_algorithm(settings)
    loss, metrics = policy_loss(settings)(TOKENS)
    ours, same_metrics = bind(POLICY_LOSSES["ppo_clip"], AlgorithmConfig(clip_high=0.3))(TOKENS)
    assert torch.equal(loss, 2 * ours) and metrics.keys() == same_metrics.keys()
    loss.sum().backward()
    assert TOKENS.logprobs.grad.abs().sum() > 0
    values, none = policy_loss(AlgorithmConfig(loss="my_algorithm:alone", clip_low=0.5))(TOKENS)
    assert torch.equal(values, 0.5 * TOKENS.logprobs) and none == {}


def test_an_advantage_of_answers_and_one_of_tokens() -> None:
    of_answers = AlgorithmConfig(advantage="my_algorithm:answers", norm_std=False)
    check_algorithm(of_answers)
    assert token_advantage(of_answers) is None
    found = answer_advantage(of_answers)(SCORED)
    assert found.dtype == torch.float64
    assert torch.allclose(found, ADVANTAGES["dr_grpo"](SCORED), atol=1e-6)
    of_tokens = AlgorithmConfig(advantage="my_algorithm:tokens", gamma=0.5)
    check_algorithm(of_tokens)
    assert answer_advantage(of_tokens) is None
    rewards, samples = torch.tensor([0.0, 1.0, 2.0]).double(), torch.tensor([0, 0, 1])
    ours = TOKEN_ADVANTAGES["reinforce_returns"](rewards, None, samples, gamma=0.5)
    assert all(map(torch.equal, token_advantage(of_tokens)(rewards, None, samples), ours))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"loss": "my_algorithm:nothing"},
            "algorithm.loss: my_algorithm:nothing cannot be imported: my_algorithm has no",
        ),
        ({"loss": "no_such_module:f"}, "algorithm.loss: no_such_module:f cannot be imported: ModuleNotFoundError: "),
        (
            {"loss": "./my_algorithm.py:mean"},
            "algorithm.loss: ./my_algorithm.py:mean: must be a module, not a file; write my_a",
        ),
        (
            {"loss": "my_algorithm:greedy_of"},
            "algorithm.loss: my_algorithm:greedy_of needs `temperature`, which is not a",
        ),
        (
            {"loss": "my_algorithm:two"},
            "algorithm.loss: my_algorithm:two takes 2 arguments by position, and must",
        ),
        (
            {"advantage": "my_algorithm:two"},
            "algorithm.advantage: my_algorithm:two takes 2 arguments by position, and",
        ),
        (
            {"loss": "my_algorithm:clipped", "args": {"strenght": 2}},
            "algorithm.args.strenght: my_algorithm:clipped takes clip_high, clip_low, strength",
        ),
        (
            {"loss": "my_algorithm:clipped", "args": {"clip_low": 2}},
            "algorithm.args.clip_low: is a setting of its own; set algorithm.clip_low",
        ),
    ],
)
def test_a_mistake_is_told_before_the_process_group_forms(settings: dict, line: str) -> None:
    with pytest.raises(UserError) as raised:
        check_algorithm(AlgorithmConfig(**settings))
    assert str(raised.value).startswith(line)


def test_args_without_a_function_of_ones_own_are_refused() -> None:
    with pytest.raises(UserError, match="args: only for a loss or an advantage of your own"):
        AlgorithmConfig(args={"strength": 2.0})


def test_what_it_raises_has_its_file_and_line_and_a_wrong_shape_is_named() -> None:
    with pytest.raises(UserError) as raised:
        policy_loss(AlgorithmConfig(loss="my_algorithm:raising"))(TOKENS)
    assert str(raised.value).startswith("algorithm.loss: my_algorithm:raising: my_algorithm.py:11: AttributeError: ")
    assert raised.value.report.splitlines()[-2:][0].strip().startswith(("return total.nothing", "^"))
    with pytest.raises(
        UserError, match=r"my_algorithm:mean returned a tensor of shape \[\], not a tensor of shape \[3\]"
    ):
        policy_loss(AlgorithmConfig(loss="my_algorithm:mean"))(TOKENS)


def test_a_key_that_only_ones_own_function_reads_has_an_effect() -> None:
    unread = dict(unread_algorithm_keys(AlgorithmConfig(loss="my_algorithm:clipped")))
    assert "algorithm.clip_low" not in unread and "algorithm.kimi_tau" in unread


def test_its_code_is_part_of_the_runs_identity(mine) -> None:
    cfg = RlvrConfig(algorithm=AlgorithmConfig(loss="my_algorithm:clipped"))
    before, digests = identity_hash(cfg), sources(cfg)
    assert list(digests) == ["source of my_algorithm:clipped"] and sources(RlvrConfig()) == {}
    mine.write_text(MINE.replace("strength * loss", "-strength * loss"))
    assert identity_hash(cfg) != before and sources(cfg) != digests
