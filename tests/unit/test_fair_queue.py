"""Several clients of one host: each gets its share, however much another asks for."""

import asyncio

import pytest

from spmd_rl import sidecar
from spmd_rl.sidecar.fair_queue import FairQueue
from spmd_rl.types import AnswerInfo, Node
from tests.unit.sidecar_helpers import ask, private_node, prompt, rewards
from tests.unit.test_sessions import envs, play, play_all


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def test_clients_have_their_turns_and_their_order():
    queue = FairQueue()
    for client, items in {"a": "123456", "b": "xyz", "c": "!"}.items():
        for item in items:
            queue.push(client, item)
    queue.push("b", "w", first=True)
    queue.discard("a", "4")
    queue.discard("a", "4")
    queue.discard("d", "?")
    assert len(queue) == 10 and sorted(queue) == sorted("12356xyzw!")
    assert "".join(queue.pop() for _ in range(10)) == "1w!2x3y5z6"
    with pytest.raises(KeyError):
        queue.pop()


def test_one_clients_waiting_requests_starve_nobody(node):
    """Thousands of resets and answers of one client wait; another's few are served in between, and not after them."""
    other = Node(1, 1, node.address)
    settings = envs("Counts", workers=1, envs_per_worker=2, args={"seconds": 0.002})

    async def crowd(client, ask_all, few, many):
        """How many of the crowd's calls were answered when the last of the few was."""
        calls = [asyncio.create_task(call) for call in many]
        while client.outstanding < len(calls):
            await asyncio.sleep(0.01)
        await ask_all(few)
        answered = sum(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return answered

    with sidecar.connect_environments(settings, node) as greedy, sidecar.connect_environments(settings, other) as few:
        waiting = [play(greedy, seed) for seed in range(3000)]
        assert asyncio.run(crowd(greedy, lambda seeds: play_all(few, seeds), range(8), waiting)) < 300
    slow = rewards("Number", workers=1, args={"seconds": 0.002})
    with sidecar.connect(slow, node) as greedy, sidecar.connect(slow, other) as few:
        waiting = [greedy.score(prompt(), str(i), AnswerInfo(3, "stop")) for i in range(3000)]
        assert asyncio.run(crowd(greedy, lambda answers: ask(few, answers), ["a"] * 8, waiting)) < 300
