"""A user's own episode in one file, through the door: what it asks for, its budget, and its mistakes."""

from itertools import pairwise

import pytest

from spmd_rl.model.tokenizer import load_tokenizer
from tests.e2e.runs import EXACT, ROOT, Toy

SECOND_CHANCE = '''
from spmd_rl.types import Message

RETRY = (Message("user", "wrong"),)


async def second_chance(ctx):
    """Ask, check, ask again."""
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    verdict = await ctx.score(turn.text)
    if verdict.score < 1:
        turn = await ctx.generate(ctx.reply(RETRY))
        verdict = await ctx.score(turn.text)
    return ctx.sample(verdict)


async def until_right(ctx):
    ids = ctx.render(ctx.prompt.messages)
    while True:
        turn = await ctx.generate(ids)
        if (await ctx.score(turn.text)).score == 1 and ctx.answer_index == 0:
            return ctx.sample(await ctx.score(turn.text))
        ids = ctx.reply(RETRY)


async def unlucky(ctx):
    turn = await ctx.generate(ctx.render(ctx.prompt.messages))
    if ctx.answer_index == 1:
        turn.missing
    return ctx.sample(await ctx.score(turn.text))
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    (toy.path / "my_episodes.py").write_text(SECOND_CHANCE)
    return toy


def run(toy: Toy, target: str, *settings: str, ranks: int = 2, name: str = ""):
    env = {"PYTHONPATH": f"{ROOT}:{toy.path}"}
    words = (*EXACT, "steps=2", "eval.every=0", f"rollout.target=my_episodes:{target}", *settings)
    return toy.start(*words, ranks=ranks, name=name or target, env=env)


def test_a_second_chance_is_trained_on(toy: Toy) -> None:
    started = run(toy, "second_chance", "algorithm.correction.level=token")
    assert started.wait() == 0, started.text()[-3000:]
    rows = [row for step in (1, 2) for row in started.samples(step)]
    assert {len(row["turns"]) for row in rows} == {1, 2}
    for row in rows:
        assert (len(row["turns"]) == 1) <= (row["verdict"]["score"] == 1)
        for turn, following in pairwise(row["turns"]):  # an answer that was cut off is ended by us
            ended = turn["finish_reason"] == "stop"
            assert following["prompt_ids"] == reply_to_cut_off(toy)[1 if ended else 0 :]
        assert all(1 <= len(turn["token_ids"]) <= 6 for turn in row["turns"])
    assert any(row["kept"] and len(row["turns"]) == 2 for row in rows)
    for line in started.metrics()[1:]:
        assert line["actor/grad_norm"] > 0 and line["train_infer/abs_diff/mean"] < 1e-4


def reply_to_cut_off(toy: Toy) -> list[int]:
    """The token ids with which the second question follows an answer without an end."""
    tokenizer = load_tokenizer(toy.model)
    return tokenizer.encode("<|im_end|>\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n").tolist()


def test_an_episode_that_overruns_its_context_ends_as_length_and_the_run_goes_on(toy: Toy) -> None:
    settings = ("rollout.max_prompt_tokens=48", "rollout.max_context_tokens=64")
    started = run(toy, "until_right", *settings)
    assert started.wait() == 0, started.text()[-3000:]
    rows = [row for step in (1, 2) for row in started.samples(step)]
    over = [row for row in rows if row["turns"][-1]["finish_reason"] == "length" and row["answer"]]
    assert over and all(row["verdict"]["status"] == "ok" for row in over)
    for row in over:
        num_tokens = sum(len(turn["prompt_ids"]) + len(turn["token_ids"]) for turn in row["turns"])
        assert num_tokens <= 64 < num_tokens + len(reply_to_cut_off(toy)) + 1
    assert len(started.metrics()) == 3


def test_a_mistake_in_an_episode_costs_that_sample(toy: Toy) -> None:
    started = run(toy, "unlucky", "reward.error_budget=0.5", ranks=0)
    assert started.wait() == 0, started.text()[-3000:]
    rows = [row for step in (1, 2) for row in started.samples(step)]
    for row in rows:
        assert row["verdict"]["status"] == ("error" if row["answer"] == 1 else "ok")
        assert row["answer"] != 1 or "my_episodes.py:29: AttributeError: " in row["verdict"]["detail"]
        assert not (row["kept"] and row["answer"] == 1)
    started = run(toy, "unlucky", "reward.error_budget=0.1", ranks=0, name="spent")
    assert started.wait() == 1
    line = started.text().strip().splitlines()[-1]
    assert "reward.error_budget=0.1: 25% of the answers of step 1 got no score; the first: error: my_epis" in line
