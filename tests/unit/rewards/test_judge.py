"""Judges and remote rewarders against a server that behaves badly: failures are never zeros."""

import asyncio
import tempfile
import time

import pytest

from rewards.judge import JudgeReward
from rewards.remote import RemoteReward
from spmd_rl import sidecar
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sidecar.http import MAX_REPLY_BYTES, HttpService
from spmd_rl.types import Message, Node, Prompt, Verdict
from tests.patience import patient
from tests.unit.rewards.helpers import INFO, YES, prompt, server, verdict


def judge(url: str, **args) -> JudgeReward:
    return JudgeReward(f"{url}/v1", "m", HttpService(attempts=3, pause=0.01), **args)


def said(content: str):
    return {"choices": [{"message": {"content": content}}]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("YES", 1.0),
        ("No.", 0.0),
        ("<think>no, yes</think> **no**", 0.0),
        ("Yes, there is no difference.", 1.0),
        ("NO. A correct answer would get a YES.", 0.0),
        ("At first I thought no.\n\n**Verdict: yes**", 1.0),
        ("Is it? It says yes.\nNo", 0.0),
        ('```json\n{"reason": "no error", "verdict": "yes"}\n```', 1.0),
    ],
)
def test_yes_or_no(reply, expected):
    with server(lambda body: said(reply)) as (url, asked):
        assert verdict(judge(url), prompt("4", "2 + 2?"), "It is 4.") == Verdict("ok", expected, {"judge": expected})
    assert asked[0]["path"] == "/v1/chat/completions" and asked[0]["body"]["model"] == "m"
    content = asked[0]["body"]["messages"][0]["content"]
    assert "2 + 2?" in content and "It is 4." in content and "Reference answer:\n4" in content


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7", 0.7),
        ("7.5 / 10", 0.75),
        ("10/10", 1.0),
        ("Points: 0", 0.0),
        ("8 out of 10", 0.8),
        ("8 of 10", 0.8),
        ("**8**/10", 0.8),
        ("Score: 8 (max. 10)", 0.8),
        ("8/10, as 2 points are lost for style.", 0.8),
        (".5", 0.05),
        ("7,5", 0.75),
        ("Reward: 10", 1.0),
        ("It has 3 errors, 2 of them grave.\nScore: 4", 0.4),
        ("It has 3 errors.\n\n**6/10**", 0.6),
        ('{"reason": "2 errors", "score": 6}', 0.6),
    ],
)
def test_points(reply, expected):
    with server(lambda body: said(reply)) as (url, asked):
        found = verdict(judge(url, scale="points", rubric="Is it kind?"), prompt("4"), "It is 4.")
    assert found.score == expected and "Is it kind?" in asked[0]["body"]["messages"][0]["content"]


BAD = {
    "500": 500,
    "404": 404,
    "garbage": b"<html>",
    "other JSON": {"choices": []},
    "a list": [1],
    "no content": {"choices": [{"message": {"content": None}}]},
    "neither": said("perhaps"),
    "both in a sentence": said("Is it? No. But yes: yes"),
    "a word that begins like no": said("None of it is right, yes"),
    "hangs up": 0.0,
    "too long": b"1" * (MAX_REPLY_BYTES + 100),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
def test_a_judge_that_fails_is_an_error_never_a_zero(reply):
    with server(lambda body: reply) as (url, _):
        found = verdict(judge(url), prompt("4"), "It is 4.")
    assert found.status == "error" and found.detail and not found.scored


@pytest.mark.parametrize(
    "reply", ["11", "-1", "none", "4/5", "10 errors", "It has 2 errors", "The 8 is right", "1,000", "8 is too much"]
)
def test_points_off_the_scale_or_in_a_sentence_are_an_error(reply):
    with server(lambda body: said(reply)) as (url, _):
        assert verdict(judge(url, scale="points"), prompt("4"), "4").status == "error"


def test_a_judge_that_hangs_is_a_timeout():
    start = time.monotonic()
    with server(lambda body: 2.0) as (url, _):
        assert verdict(judge(url), prompt("4"), "4", timeout=0.2).status == "timeout"
        slow = JudgeReward(url, "m", HttpService(seconds=0.2))
        assert verdict(slow, prompt("4"), "4").status == "timeout"
    assert time.monotonic() - start < patient(2)


def test_a_reply_without_end_is_cut_off():
    start = time.monotonic()
    with server(lambda body: (200, {"content-length": str(1 << 40)})) as (url, _):
        found = verdict(judge(url), prompt("4"), "4")
    assert "longer than" in found.detail and time.monotonic() - start < patient(5)


def test_nobody_there_is_an_error():
    found = verdict(judge("http://127.0.0.1:9"), prompt("4"), "4")
    assert found.status == "error" and "3 attempts" in found.detail


def test_busy_servers_are_asked_again_after_the_pause_they_ask_for():
    replies = [503, ((429, {"retry-after": "1"})), YES]
    start = time.monotonic()
    with server(lambda body: replies.pop(0)) as (url, asked):
        assert verdict(judge(url), prompt("4"), "4").score == 1.0
    assert len(asked) == 3 and time.monotonic() - start >= 1.0


def test_the_same_question_is_asked_once_even_at_the_same_time():
    async def ask(rewarder, answers):
        return await asyncio.gather(*(rewarder.score(prompt("4"), answer, None) for answer in answers))

    with server(lambda body: YES) as (url, asked):
        rewarder = judge(url)
        found = asyncio.run(ask(rewarder, ["4", "5", "4", "4"]))
        assert [v.score for v in found] == [1.0] * 4 and len(asked) == 2
        asyncio.run(ask(rewarder, ["5"]))  # on another event loop
        assert len(asked) == 2


def test_a_failure_is_not_kept():
    replies = [404, YES]
    with server(lambda body: replies.pop(0)) as (url, _):
        rewarder = judge(url)
        assert [verdict(rewarder, prompt("4"), "4").status for _ in range(2)] == ["error", "ok"]


def test_one_who_gives_up_leaves_the_others_their_reply():
    async def both(rewarder):
        first = asyncio.create_task(rewarder.score(prompt("4"), "4", None))
        second = asyncio.create_task(rewarder.score(prompt("4"), "4", None))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    def slow(body):
        time.sleep(0.2)
        return YES

    with server(slow) as (url, asked):
        assert asyncio.run(both(judge(url))).score == 1.0 and len(asked) == 1


@pytest.mark.parametrize(("budget", "calls"), [({"max_requests": 2}, 2), ({"max_total_tokens": 120}, 3)])
def test_over_budget_is_an_error_that_says_so(budget, calls):
    with server(lambda body: YES) as (url, asked):
        rewarder = judge(url, **budget)
        found = [verdict(rewarder, prompt("4"), str(number)) for number in range(5)]
    assert [v.status for v in found] == ["ok"] * calls + ["error"] * (5 - calls) and len(asked) == calls
    assert "budget" in found[-1].detail and "spent" in found[-1].detail


def test_tokens_are_estimated_where_the_server_does_not_count():
    with server(lambda body: said("YES")) as (url, asked):
        rewarder = judge(url, max_total_tokens=1)
        assert [verdict(rewarder, prompt("4"), answer).status for answer in "ab"] == ["ok", "error"]


def test_what_is_put_into_the_template_is_not_a_template():
    with server(lambda body: YES) as (url, asked):
        verdict(judge(url, template="{answer}|{truth}|{x, y}"), prompt("4"), "{truth} {}")
    assert asked[0]["body"]["messages"][0]["content"] == "{truth} {}|4|{x, y}"


def test_only_the_answer_is_shown_and_none_is_wrong_format():
    messages = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"), Message("user", "v"))
    row = Prompt("0" * 32, messages, "general", "4")
    with server(lambda body: YES) as (url, asked):
        verdict(judge(url, template="{question}|{answer}"), row, "<think>secret</think> 4 ")
        assert verdict(judge(url), row, "<think>4").status == "wrong_format"
    assert [a["body"]["messages"][0]["content"] for a in asked] == ["user: u\n\nassistant: a\n\nuser: v|4"]


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with server(lambda body: YES) as (url, asked):
        verdict(judge(url, key_env="JUDGE_KEY"), prompt("4"), "4")
    assert asked[0]["headers"]["Authorization"] == "Bearer secret"
    with pytest.raises(KeyError):
        judge(url, key_env="NO_SUCH_KEY")


def test_judge_through_a_sidecar():
    """Services reach a worker, also the parts of a composite; a slow judge does not hold up the others."""

    def reply(body):
        slow = "hang" in body["messages"][0]["content"]
        return 6.0 if slow else YES

    async def ask(scorer):
        slow = asyncio.create_task(scorer.score(prompt("4", domain="x"), "hang", INFO))
        await asyncio.sleep(0.5)  # it is under way by now
        quick = [scorer.score(prompt("4", domain="x"), str(number), INFO) for number in range(20)]
        found = await asyncio.gather(*quick)
        assert not slow.done()
        return [await slow, *found]

    with server(reply) as (url, asked), tempfile.TemporaryDirectory(prefix="spmd-") as directory:
        parts = {"judge": {"target": "rewards.judge:JudgeReward", "args": {"url": url, "model": "m"}}}
        reward = RewardConfig(target="rewards.composite:CompositeReward", args={"parts": parts}, timeout=4.0)
        node = Node(0, 0, f"ipc://{directory}/s/host.sock")
        with sidecar.connect(RewardsConfig(domains={"x": reward}), node) as scorer:
            found = asyncio.run(ask(scorer))
    assert [v.status for v in found] == ["timeout"] + ["ok"] * 20
    assert found[1] == Verdict("ok", 1.0, {"judge": 1.0, "judge.judge": 1.0})


def remote(url: str) -> RemoteReward:
    return RemoteReward(url, HttpService(attempts=2, pause=0.01))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"score": 1}, Verdict("ok", 1.0)),
        ({"status": "wrong_format", "score": -1.5, "parts": {"a": 2}}, Verdict("wrong_format", -1.5, {"a": 2.0})),
        ({"status": "timeout", "detail": "slow"}, Verdict("timeout", detail="slow")),
        ({"status": "rejected"}, Verdict("rejected")),
    ],
)
def test_a_remote_verdict_is_taken_as_it_is(reply, expected):
    with server(lambda body: reply) as (url, asked):
        assert verdict(remote(f"{url}/score"), prompt("4", "2 + 2?", level=3), "4") == expected
    assert asked[0]["path"] == "/score" and asked[0]["body"] == {
        "prompt": {
            "id": "0" * 32,
            "messages": [{"role": "user", "content": "2 + 2?"}],
            "domain": "math",
            "ground_truth": "4",
            "extra": {"level": 3},
            "priority": 0.0,
        },
        "answer": "4",
        "info": {"num_tokens": 1, "finish_reason": "stop", "turns": 1},
    }


@pytest.mark.parametrize(
    "reply",
    [{}, [], {"score": "1"}, {"score": True}, {"score": None}, {"status": "good", "score": 1}, {"score": 1, "parts": 2}]
    + [{"score": 1, "parts": {"a": "b"}}, b'{"score": NaN}', 500, 404, b"{", 0.0],
)
def test_a_remote_reply_that_is_no_verdict_is_an_error(reply):
    with server(lambda body: reply) as (url, _):
        found = verdict(remote(url), prompt("4"), "4")
    assert found.status == "error" and not found.scored
