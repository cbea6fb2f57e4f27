"""A thinking budget: what is sampled, what is put between, and what has no part in the loss."""

import asyncio
from array import array
from functools import partial
from random import Random

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.batch import pack
from spmd_rl.config.checks import check_episode
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.data import counter_seed
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.episode import Budget, Context, Sampling, play
from spmd_rl.rollout.thinking import thinking
from spmd_rl.types import Completion, Message, Prompt, Sample, Verdict
from tests.models import tiny

PROMPT = Prompt("0" * 32, (Message("user", "?"),), "toy", "")
END = "\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte."""
    path = tmp_path_factory.mktemp("tiny")
    tiny("qwen2", path)
    return load_tokenizer(path)


class Policy:
    """Says one text, and another one after its thoughts were ended for it; is cut short at random."""

    def __init__(self, tokenizer, said: str, forced: str = "42", cuts: Random | None = None) -> None:
        self.tokenizer, self.said, self.forced, self.cuts = tokenizer, said, forced, cuts
        self.asked, self.scored = [], []

    async def generate(self, request) -> Completion:
        self.asked.append(request)
        text = self.tokenizer.decode(request.prompt_ids)
        begun = text.partition("assistant\n")[2]
        spoken, _, after = begun.partition(END)
        was_forced = END in begun and not self.said.startswith(begun[: len(self.said)])
        left = self.forced[len(after) :] if was_forced else self.said[len(begun) :]
        ids = self.tokenizer.encode(left) + array("i", self.tokenizer.stop_ids[:1])
        count, reason = (
            min(len(ids), request.max_new_tokens),
            "stop" if len(ids) <= request.max_new_tokens else "length",
        )
        if self.cuts and count > 1 and self.cuts.random() < 0.5:
            count, reason = self.cuts.randrange(count), "abort"
        ids = ids[:count]
        version = len(self.asked)
        return Completion(request.id, ids, array("f", [-0.5] * count), array("i", [version] * count), reason)

    async def score(self, prompt, text, info) -> Verdict:
        self.scored.append(text)
        return Verdict("ok", 1.0)


def played(tokenizer, policy: Policy, **keys) -> Sample:
    settings = RolloutConfig(**{"thinking_budget": 8, "max_new_tokens": 40, **keys})
    seed = partial(counter_seed, 0, "train", 0, PROMPT.id)
    ctx = Context(PROMPT, 5, 0, seed, Sampling(0, "train", 1.0, settings.max_new_tokens), Budget(4096), tokenizer,
                  policy, policy)  # fmt: skip
    (sample,) = asyncio.run(play(thinking(settings, tokenizer), ctx))
    return sample


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_thoughts_are_ended_at_the_budget_and_the_end_is_not_learnt(tokenizer, seed: int | None) -> None:
    """Also where the ends of steps cut the answer short, in its thoughts or after them."""
    policy = Policy(tokenizer, "hm, hm, hm, hm", cuts=None if seed is None else Random(seed))
    sample = played(tokenizer, policy)
    assert policy.scored == ["hm, hm, " + END + "42"]
    first, second = sample.turns
    assert (first.text, first.finish_reason, second.text, second.finish_reason) == ("hm, hm, ", "length", "42", "stop")
    assert tokenizer.decode(second.prompt_ids) == END
    batch = pack([sample])
    learnt = batch.token_ids[batch.loss_mask].tolist()
    assert learnt == [*tokenizer.encode("hm, hm, 42"), tokenizer.stop_ids[0]]
    assert len(first.token_ids) == len(first.logprobs) == len(first.versions) == 8
    if seed is None:
        assert [len(request.prompt_ids) - len(policy.asked[0].prompt_ids) for request in policy.asked] == [
            0,
            8 + len(END),
        ]
        assert policy.asked[1].max_new_tokens == 40 - 8 - len(END)
        assert len({request.seed for request in policy.asked}) == 2


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_an_answer_that_has_ended_its_thoughts_is_one_turn_of_its_full_length(tokenizer, seed: int | None) -> None:
    """Within the budget, whether it ends there or goes on beyond it; and one that says nothing of thoughts."""
    for said in ("a</think>4", "</think>the answer is 42", "4"):
        budget = 12 if said.startswith("a") else 10
        policy = Policy(tokenizer, said, cuts=None if seed is None else Random(seed))
        sample = played(tokenizer, policy, thinking_budget=budget)
        (turn,) = sample.turns
        assert (turn.text, turn.finish_reason, policy.scored) == (said, "stop", [said])
        assert len(turn.token_ids) == len(turn.logprobs) == len(said) + 1
    policy = Policy(tokenizer, "</think>" + "x" * 99)
    sample = played(tokenizer, policy, thinking_budget=10)
    assert [(len(turn.token_ids), turn.finish_reason) for turn in sample.turns] == [(40, "length")]


def test_mistakes_in_the_budget(tokenizer) -> None:
    for key, keys in {
        "thinking_budget: 40 leaves nothing": {"thinking_budget": 40, "max_new_tokens": 40},
        "thinking_end: 'so' has no closing tag": {"thinking_end": "so"},
        "thinking_budget: an episode of your own": {"thinking_budget": 4, "target": "a:b"},
    }.items():
        with pytest.raises(ValueError, match=key):
            RolloutConfig(**keys)
    with pytest.raises(UserError, match=r"rollout.thinking_budget: 29 and 11 tokens of rollout.thinking_end leave"):
        thinking(RolloutConfig(thinking_budget=29, max_new_tokens=40), tokenizer)
    agents = EnvsConfig(tags={"toy": EnvConfig(target="a:B")})
    with pytest.raises(UserError, match="not supported for agents"):
        check_episode(RolloutConfig(thinking_budget=4), agents)
    long = RolloutConfig(thinking_budget=4, thinking_end="Time is up.\\n</think>\\n")
    assert (long.thinking_end_text, long.thinking_tag) == ("Time is up.\n</think>\n", "</think>")
