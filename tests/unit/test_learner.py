"""The learner: which passes it makes, what it leaves out, and what it evaluates."""

import json
import math
from array import array
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import msgspec
import pytest
import torch

from spmd_rl.base.errors import RunFailed
from spmd_rl.batch import pack
from spmd_rl.config.schema import AlgorithmConfig, RlvrConfig
from spmd_rl.config.sections.algorithm import BoundsConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import Evaluation, Imitation, Learner, losses, sample_log
from spmd_rl.train import Roles
from spmd_rl.types import Group, Message, Prompt, Sample, Turn, Verdict
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, make_rollouts
from tests.unit.test_prepare import GROUPS, collected, group, plan_of, planned, sample


class FakeBackend:
    """Says the same, by default -0.3, of every token; notes what it was asked."""

    hidden_size = 64
    sees = False
    sync_steps = None

    def __init__(self, logprob: float = -0.3) -> None:
        self.asked: list[str] = []
        self.logprob = logprob
        with solo() as world:
            self.layout = Layout(world)

    def logprobs(self, batch, temperature):
        self.asked.append("logprobs")
        return torch.full((batch.num_tokens,), self.logprob), torch.zeros(batch.num_tokens)

    def update(self, batch, loss, temperature):
        n = int(batch.loss_mask.sum())
        self.asked.append(f"update of {n}")
        values, quantities = loss(torch.full((n,), self.logprob), torch.ones(n), batch)
        return {"loss": float(values.sum()), "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "num_microbatches": 1.0} | {
            name: float(q.mean()) for name, q in quantities.items()
        }

    def awake(self):
        return nullcontext()


def learner_of(cfg: RlvrConfig, policy, reference, critic, world) -> Learner:
    policy.layout = Layout(world)
    return Learner(cfg, Roles(policy, reference, critic))


def evaluation(cfg: RlvrConfig) -> Evaluation:
    return Evaluation(cfg.eval, cfg.rollout, cfg.seed, cfg.steps, cfg.reward.error_budget)


def step(cfg: RlvrConfig, harvest, reference=None, critic=None):
    policy, cfg.policy.dtype = FakeBackend(), "bfloat16"
    with solo() as world:
        learner = learner_of(cfg, policy, reference, critic, world)
        metrics = learner.update(learner.prepare(harvest))
        return policy, metrics, learner


def test_one_update_on_fresh_samples_makes_no_logprob_pass() -> None:
    policy, metrics, _ = step(RlvrConfig(), collected(GROUPS))
    assert policy.asked == ["update of 15"]
    assert metrics["actor/grad_norm"] == 2.0 and metrics["actor/entropy"] == 1.0
    assert metrics["train_infer/abs_diff/mean"] == pytest.approx(0.2)


def test_stale_tokens_or_several_updates_need_one() -> None:
    cfg = RlvrConfig()
    policy, _, _ = step(cfg, collected(GROUPS, version=1))
    assert policy.asked == ["logprobs", "update of 15"]
    cfg.train.updates_per_step = 3
    policy, _, _ = step(cfg, collected(GROUPS))
    assert policy.asked == ["logprobs"] * 3 + ["update of 5", "update of 6", "update of 4"]


def test_with_the_engines_logprobs_stale_tokens_need_none() -> None:
    cfg = RlvrConfig()
    cfg.algorithm.old_logprobs = "engine"
    policy, metrics, _ = step(cfg, collected(GROUPS, version=1))
    assert policy.asked == ["update of 15"]
    assert metrics["actor/ratio"] == pytest.approx(math.exp(-0.2))  # -0.3 over the engine's -0.1
    assert metrics["train_infer/abs_diff/mean"] == pytest.approx(0.2)


BREACHES = {
    "max_abs_diff=0.1": "train_infer/abs_diff/mean is 0.2, above",
    "min_ess=1": "train_infer/ess is 0.9129, below",  # of 9 weights exp(0.5) and 6 of exp(-0.2)
    "max_lag=0": "rollout/lag/max is 1, above",
}


@pytest.mark.parametrize("bound", BREACHES)
@pytest.mark.parametrize("version", [0, 1])
def test_a_step_outside_of_a_bound_stops_before_its_update_or_warns_once(bound: str, version: int, capsys) -> None:
    """Fresh samples, of which only the update knows the trainer's logprobs; and stale ones."""
    key, _, value = bound.partition("=")
    cfg, harvest = RlvrConfig(), collected(deepcopy(GROUPS), version=version)
    if key == "min_ess":
        uneven(harvest)
    cfg.algorithm.bounds = BoundsConfig(None, None, None)
    setattr(cfg.algorithm.bounds, key, float(value))
    policy, cfg.policy.dtype, breaks = FakeBackend(), "bfloat16", key != "max_lag" or version == 1
    with solo() as world:
        learner = learner_of(cfg, policy, None, None, world)
        for _ in range(3):
            learner.update(learner.prepare(harvest))
        said = [line for line in capsys.readouterr().err.splitlines() if "algorithm.bounds" in line]
        assert len(said) == breaks and all(BREACHES[bound] in line for line in said)
        policy.asked.clear()
        cfg.algorithm.bounds.on_breach = "stop"
        with pytest.raises(RunFailed, match=f"step 1: .*algorithm.bounds.{bound}") if breaks else nullcontext():
            learner.prepare(harvest)
        assert policy.asked == ["logprobs"]


def uneven(harvest) -> None:
    """Let the engine's logprobs of each second token be other ones."""
    for found in harvest.groups:
        for one in found.samples:
            for turn in one.turns:
                turn.logprobs[::2] = array("f", [-0.8] * len(turn.logprobs[::2]))


def test_the_reference_is_asked_only_for_a_kl() -> None:
    cfg, reference = RlvrConfig(), FakeBackend()
    cfg.algorithm.kl_coef = 0.1
    policy, metrics, _ = step(cfg, collected(GROUPS), reference)
    assert reference.asked == ["logprobs"] and policy.asked == ["update of 15"]
    assert metrics["actor/kl_loss"] == 0.0


class Follower(FakeBackend):
    """A reference that follows every second step."""

    sync_steps = 2

    def follow(self, policy):
        self.asked.append(f"follows after {policy.asked[-1]}")


def test_the_reference_follows_after_the_update_of_every_so_many_steps() -> None:
    cfg, reference = RlvrConfig(), Follower()
    cfg.policy.dtype, cfg.algorithm.kl_coef = "bfloat16", 0.1
    with solo() as world:
        learner = learner_of(cfg, FakeBackend(), reference, None, world)
        for number in (1, 2, 3, 4):
            learner.update(learner.prepare(replace(collected(GROUPS), step=number)))
    once = ["logprobs", "logprobs", "follows after update of 15"]
    assert reference.asked == [*once, *once]


def test_a_step_without_groups_updates_nothing_and_is_counted() -> None:
    policy, metrics, learner = step(RlvrConfig(), collected([]))
    assert policy.asked == []
    assert metrics == {"actor/empty_steps": 1, "actor/balance": 1.0, "actor/left_out": 0.0}
    assert learner.state()["num_empty_steps"] == 1


def steps_of(harvests: list, **keys) -> tuple[Learner, list[dict[str, float]]]:
    """A learner after some steps, and their metrics."""
    cfg = RlvrConfig()
    cfg.policy.dtype, cfg.algorithm = "bfloat16", AlgorithmConfig(**keys)
    with solo() as world:
        learner = learner_of(cfg, FakeBackend(), None, None, world)
        return learner, [learner.update(learner.prepare(harvest)) for harvest in harvests]


FLAT = [group(ticket, [(2, 1.0), (3, 1.0)]) for ticket in range(3)]


def test_steps_from_which_nothing_can_be_learnt_are_told(capsys) -> None:
    """Five in a row; one with an advantage begins the count again, and a resume does not."""
    learner, _ = steps_of([collected(FLAT)] * 4 + [collected(GROUPS)] + [collected(FLAT)] * 4)
    assert capsys.readouterr().err == "" and learner.state()["num_flat_steps"] == 4
    with solo() as world:
        cfg = RlvrConfig()
        cfg.policy.dtype = "bfloat16"
        resumed = learner_of(cfg, FakeBackend(), None, None, world)
        resumed.load_state(json.loads(json.dumps(learner.state())))
        resumed.prepare(collected([]))
    told = capsys.readouterr().err
    assert "no answer had an advantage in 5 steps in a row" in told and told.count("\n") == 1


def test_the_variance_filter_keeps_the_groups_that_vary() -> None:
    """Variances of 1/2, 1/8 and 1/2 with GROUPS; nothing of equal scores is ever kept."""
    learner, (metrics,) = steps_of([collected([*GROUPS, *FLAT[:1]])], variance_top_p=0.8, norm_std=False)
    assert learner.plan.keys[:, 0].tolist() == [4, 4, 9, 9]
    assert metrics["actor/left_out"] == 0.5
    assert {reason for _, reason in learner.plan.masked} == {"too little variance"}
    _, found = steps_of([collected(FLAT)] * 4, variance_top_p=0.9)
    assert found[-1]["actor/empty_steps"] == 4


def test_kl_adds_its_gradient() -> None:
    batch = pack([sample(0, 0, 3, 1.0)])
    batch.ref_logprobs = torch.full((batch.num_tokens,), -1.0)
    logprobs = torch.tensor([-0.5, -1.0, -1.5], requires_grad=True)
    loss, quantities = losses.bind_loss(AlgorithmConfig(kl_coef=0.5, kl_estimator="k2"))(
        logprobs, torch.zeros(3), batch
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.25, 0.0, -0.25])
    assert quantities["actor/kl_loss"].tolist() == pytest.approx([0.125, 0.0, 0.125])


class FakeCritic(FakeBackend):
    """Expects 0.5 everywhere."""

    def values(self, batch):
        return torch.full((batch.num_tokens,), 0.5)

    def update(self, batch, loss):
        n = int(batch.loss_mask.sum())
        self.asked.append(f"update of {n}")
        values, quantities = loss(torch.full((n,), 0.25), batch)
        return {"loss": float(values.mean()), "grad_norm": 1.0, "num_microbatches": 1.0} | {
            name: float(q.mean()) for name, q in quantities.items()
        }


def test_the_critic_learns_first_and_alone_during_its_warm_up() -> None:
    cfg, critic = RlvrConfig(), FakeCritic()
    cfg.algorithm = AlgorithmConfig(advantage="gae", critic_warmup=1)
    policy, metrics, learner = step(cfg, collected(GROUPS), critic=critic)
    assert (policy.asked, critic.asked) == ([], ["update of 15"])
    assert metrics["critic/values/mean"] == 0.5 and metrics["critic/loss"] > 0
    assert "critic/explained_variance" in metrics and metrics["actor/empty_steps"] == 0
    assert not [key for key in metrics if key in ("actor/pg_loss", "actor/grad_norm", "critic/update")]
    cfg.algorithm.critic_warmup = 0
    policy, metrics, _ = step(cfg, collected(GROUPS), critic=critic)
    assert policy.asked == ["update of 15"] and metrics["actor/grad_norm"] == 2.0


class FarReference(FakeBackend):
    """A reference that is 0.1 nats away from the policy at every token."""

    def logprobs(self, batch, temperature):
        return torch.full((batch.num_tokens,), -0.4), torch.zeros(batch.num_tokens)


def test_the_controller_drives_the_kl_to_its_target_and_survives_a_resume() -> None:
    """0.1 nats at 15 tokens of 6 answers: 0.25 nats an answer."""
    for target, factor in (
        (0.125, 1 + 0.2 * 6 / 100),
        (0.24, 1 + (0.25 / 0.24 - 1) * 6 / 100),
        (9.0, 1 - 0.2 * 6 / 100),
    ):
        cfg = RlvrConfig()
        cfg.algorithm = AlgorithmConfig(kl_coef=0.5, target_kl=target, kl_horizon=100)
        _, metrics, learner = step(cfg, collected(GROUPS), FarReference())
        assert metrics["critic/kl"] == pytest.approx(0.1) and metrics["critic/kl_coef"] == 0.5
        assert learner.state()["kl_factor"] == pytest.approx(factor)
        with solo() as world:
            resumed = learner_of(cfg, FakeBackend(), FarReference(), None, world)
            resumed.load_state(json.loads(json.dumps(learner.state())))
            assert resumed.state() == learner.state()
            metrics = resumed.update(resumed.prepare(collected(GROUPS)))
        assert metrics["critic/kl_coef"] == pytest.approx(0.5 * factor)


def test_evaluation_is_due_before_every_n_and_at_the_end() -> None:
    cfg = RlvrConfig(steps=7)
    cfg.eval.every, cfg.eval.answers = 3, 2
    with solo() as world:
        even = FakeScorer(lambda prompt, answer: int(answer[0]) % 2 == 0)
        rollouts = make_rollouts(cfg, FakeEngine(), FakePrompts(4), even, world)
        due = [s for s in range(8) if evaluation(cfg)(rollouts, world, s)]
        metrics = evaluation(cfg)(rollouts, world, 3)
    assert due == [0, 3, 6, 7]
    assert metrics.keys() == {
        "val/score/mean", "val/score_greedy/mean", "val/toy/score/mean", "val/toy/score_greedy/mean",
        "val/num_prompts", "val/toy/num_prompts", "val/error_share",
    }  # fmt: skip
    assert 0 <= metrics["val/score/mean"] <= 1
    assert (metrics["val/num_prompts"], metrics["val/toy/num_prompts"], metrics["val/error_share"]) == (2, 2, 0)


def test_held_out_answers_without_a_score_are_counted_and_said(capsys: pytest.CaptureFixture) -> None:
    class Broken(FakeScorer):
        async def score(self, prompt, answer, info):
            if prompt.ground_truth == "1":
                return Verdict("error", detail="no judge")
            return await super().score(prompt, answer, info)

    cfg = RlvrConfig(steps=7)
    with solo() as world:
        rollouts = make_rollouts(cfg, FakeEngine(), FakePrompts(4), Broken(lambda *_: 1.0), world)
        metrics = evaluation(cfg)(rollouts, world, 0)
        assert (metrics["val/num_prompts"], metrics["val/error_share"], metrics["val/score/mean"]) == (1, 0.5, 1.0)
        line = "2 of 4 held-out answers of step 0 got no score; the first: no judge"
        assert f"warning: {line}; val/* leave them out" in capsys.readouterr().err
        cfg.steps = 0  # then there is nothing else to go on for
        with pytest.raises(RunFailed) as caught:
            evaluation(cfg)(rollouts, world, 0)
        assert str(caught.value) == f"reward.error_budget=0.1: {line}"
        cfg.reward.error_budget = 0.5
        assert evaluation(cfg)(rollouts, world, 0) == metrics


def test_demonstrations_have_no_engine_to_differ_from(capsys: pytest.CaptureFixture) -> None:
    """Their logprobs mean nothing: no metric, no warning and no end of the run comes of them."""
    for updates in (1, 3):
        policy = FakeBackend(-6.9)
        with solo() as world:
            policy.layout = Layout(world)
            imitation = Imitation(policy, updates, 1.0, 1.0)
            metrics = imitation.update(imitation.prepare(collected(GROUPS)))
        assert "logprobs" not in policy.asked and metrics["warmup/loss"] == pytest.approx(6.9 * 15 / updates)
        assert not [key for key in metrics if key.startswith("train_infer/")]
        assert capsys.readouterr().err == ""


def test_the_sample_log_says_why_each_sample_was_kept_or_not() -> None:
    harvest = collected(GROUPS[:1])
    _, _, learner = step(RlvrConfig(), harvest)
    rows = list(sample_log.rows(harvest, learner.plan))
    assert [(r.ticket, r.answer, r.kept, r.reject_reason) for r in rows] == [
        (4, 0, True, None), (4, 1, True, None), (4, 2, False, "no score"),
    ]  # fmt: skip
    assert rows[0].turns[0].versions == [0, 0]
    assert [row.turns[0].logprobs for row in rows] == [[-0.1] * 2, [-0.1] * 3, [-0.1]]


def test_the_sample_log_finds_its_own_rows_in_everyones_plan() -> None:
    everyones = [group(ticket, [(2, ticket / 8), (1, 0.0), (1, 1.0)]) for ticket in (3, 4, 5, 6)]
    plan = planned(everyones)
    advantages = dict(zip(map(tuple, plan.keys.tolist()), plan.advantages.tolist(), strict=True))
    for mine in ([everyones[0], everyones[2]], [everyones[3]], []):
        harvest = replace(collected(mine), dropped=((group(1, [(2, 1.0)]), "too easy"),))
        rows = list(sample_log.rows(harvest, plan))
        assert [(row.ticket, row.answer, row.kept, row.reject_reason) for row in rows[:1]] == [
            (1, 0, False, "too easy")
        ]
        assert rows[0].advantage is None
        assert {(row.ticket, row.answer): row.advantage for row in rows[1:]} == {
            s.key: advantages[s.key] for g in mine for s in g.samples
        }
        assert all(row.kept for row in rows[1:])


def test_a_line_of_the_sample_log() -> None:
    """Two answers to the same prompt, the first in two turns, the second without a score."""
    asked, more = array("i", [5, 6]), array("i", [7])
    turns = [
        Turn(asked, array("i", [1]), array("f", [-0.1]), array("i", [0]), "stop", "a"),
        Turn(more, array("i", [2, 3]), array("f", [-0.25, -1e-9]), array("i", [0, 1]), "length", 'b"'),
        Turn(asked, array("i", [4]), array("f", [-2.0]), array("i", [1]), "stop", ""),
    ]
    verdicts = Verdict("ok", 1.0, {"part": 0.5}), Verdict("error", detail="why")
    samples = Sample(4, 0, tuple(turns[:2]), verdicts[0]), Sample(4, 1, (turns[2],), verdicts[1])
    harvest = collected([Group(Prompt("1d", (Message("user", "?"),), "toy", "42"), 4, samples)])
    head = '"id":"1d","domain":"toy","messages":[{"role":"user","content":"?"}],"ground_truth":"42"'
    told = [msgspec.json.encode(row).decode() for row in sample_log.rows(harvest, plan_of(harvest, AlgorithmConfig()))]
    assert told == [
        f'{{"ticket":4,"answer":0,{head},"turns":['
        '{"text":"a","prompt_ids":[5,6],"token_ids":[1],"logprobs":[-0.1],"versions":[0],"finish_reason":"stop"},'
        '{"text":"b\\"","prompt_ids":[7],"token_ids":[2,3],"logprobs":[-0.25,-0.0],"versions":[0,1],'
        '"finish_reason":"length"}],"verdict":{"status":"ok","score":1.0,"parts":{"part":0.5}},'
        '"advantage":0.0,"kept":true,"reject_reason":null}',
        f'{{"ticket":4,"answer":1,{head},"turns":['
        '{"text":"","prompt_ids":[5,6],"token_ids":[4],"logprobs":[-2.0],"versions":[1],"finish_reason":"stop"}],'
        '"verdict":{"status":"error","score":0.0,"parts":{},"detail":"why"},'
        '"advantage":null,"kept":false,"reject_reason":"no score"}',
    ]
