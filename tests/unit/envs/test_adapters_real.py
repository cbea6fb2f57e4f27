"""The adapters against the real packages, where they are installed."""

import json
import re
import sys
import threading
from contextlib import closing

import pytest

from envs.adapters.gem_id import GemEnv
from envs.adapters.gymnasium_id import GymnasiumEnv
from envs.adapters.openenv_server import OpenEnvServer
from envs.adapters.skyrl_gym import SkyRlGymEnv
from envs.adapters.textarena_id import TextArenaEnv
from envs.mcp import McpClient
from spmd_rl.types import RunLimits, RunResult


def test_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    with closing(GymnasiumEnv("FrozenLake-v1", {"is_slippery": False}, ["left", "down", "right", "up"])) as env:
        text, _ = env.reset(0)
        assert text.splitlines()[0] == "[S]FFF" and len(text.splitlines()) == 4
        steps = [env.step(action) for action in ("down", "down", "right", "right", "down", "right")]
        assert [step[1] for step in steps] == [0.0] * 5 + [1.0] and steps[-1][2]
        assert steps[-1][4]["metrics"]["success"] == 1.0 and "[F]HFH" in steps[0][0]
        env.reset(0)
        assert (
            env.step("left")[4]["metrics"]["action_is_valid"] == env.step("2")[4]["metrics"]["action_is_valid"] == 1.0
        )
    with closing(GymnasiumEnv("CartPole-v1")) as env:
        first, info = env.reset(2**40)
        assert first == env.reset(2**40)[0] and info["instruction"] == "An action is a number from 0 to 1."
        assert env.step("1")[1] == 1.0 and env.step("2")[1] == 0.0
    with closing(GymnasiumEnv("Pendulum-v1")) as env:
        env.reset(1)
        assert env.step("[0.5]")[4]["metrics"]["action_is_valid"] == 1.0
        for action in ("", "[9]", '["a"]', "[[1, 2]]", "{}"):
            assert env.step(action)[4]["metrics"]["action_is_valid"] == 0.0, action
    with closing(GymnasiumEnv("Blackjack-v1", actions=["stick", "hit"])) as env:
        assert re.fullmatch(r"\(\d+, \d+, [01]\)", env.reset(3)[0])


def test_gem() -> None:
    pytest.importorskip("gem")
    env, other = GemEnv("game:GuessTheNumber-v0-easy"), GemEnv("game:GuessTheNumber-v0-hard")
    text, info = env.reset(2**60)
    assert "between 1 and 10" in text and "suffix" in info

    def hunt(disturb: bool) -> list[str]:
        env.reset(2**60)
        low, high, said, ended = 1, 10, [], False
        while not ended:
            if disturb:
                other.reset(len(said))
            guess = (low + high) // 2
            text, reward, ended, _, info = env.step(str(guess))
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
            said.append(text)
        assert reward == 1.0 and info["metrics"]["success"] == 1.0
        return said

    assert hunt(False) == hunt(True)
    env.reset(1)
    _, reward, terminated, _, info = env.step("")
    assert reward < 0 and terminated and info["metrics"]["action_is_valid"] == 0.0


class Sandbox:
    """Runs nothing, and answers as a sandbox would."""

    def run(self, code: str, stdin: str, limits: RunLimits) -> RunResult:
        good = "1 / 0" not in code
        return RunResult("exit", 0 if good else 1, "4\n" if good else "", "" if good else "ZeroDivisionError", 0.1)


def test_gem_with_its_python_tool() -> None:
    pytest.importorskip("gem")
    env = GemEnv("rg:basic_arithmetic", {"size": 20}, python=True, max_tool_uses=2, sandbox=Sandbox())
    text, _ = env.reset(23)
    assert text == env.reset(3)[0] != env.reset(4)[0] and "<python>" in text and "boxed" in text
    env.reset(3)
    text, reward, terminated, _, info = env.step("I compute: <python>print(2 + 2)</python> and so on")
    assert (text, reward, terminated) == ("Code execution result: 4\n", 0.0, False)
    assert (info["metrics"]["tool_calls"], info["metrics"]["tool_failures"]) == (1.0, 0.0)
    text, _, terminated, _, info = env.step("```python\n1 / 0\n```")
    assert "ZeroDivisionError" in text and "maximum number of tool use" in text and not terminated
    assert (info["metrics"]["tool_calls"], info["metrics"]["tool_failures"]) == (1.0, 1.0)
    *_, terminated, _, info = env.step("<python>print(1)</python> \\boxed{x}")
    assert terminated and info["metrics"] == {
        "success": 0.0, "action_is_valid": 1.0, "action_is_effective": 1.0, "tool_calls": 0.0, "tool_failures": 0.0,
    }  # fmt: skip
    assert info["metrics_agg_mode"] == {"success": "last", "tool_calls": "sum", "tool_failures": "sum"}


def test_textarena() -> None:
    pytest.importorskip("textarena")
    env = TextArenaEnv("GuessTheNumber-v0")
    assert "between 1 and 20" in env.reset(5)[0]
    low, high, ended = 1, 20, False
    while not ended:
        guess = (low + high) // 2
        text, reward, ended, _, info = env.step(str(guess))
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    assert reward == 1.0 and info["metrics"]["success"] == 1.0 and "Congratulations" in text
    env.reset(5)
    text, reward, ended, _, info = env.step("99")
    assert "invalid move" in text and not ended and info["metrics"]["action_is_valid"] == 0.0
    assert env.step("98")[2]


def first_free(observation: str) -> str:
    """Plays the first free cell of those that the game last listed."""
    return re.findall(r"\[\d\]", observation.rpartition("Available Moves")[2])[0]


def test_textarena_for_two() -> None:
    pytest.importorskip("textarena")
    env = TextArenaEnv("TicTacToe-v0", players=2, opponent=f"{__name__}:first_free")
    assert "'[0]'" in env.reset(1)[0]
    text, _, terminated, _, info = env.step("8")
    assert "'[8]'" not in text and not terminated and info["metrics"]["action_is_valid"] == 1.0
    text, _, terminated, _, info = env.step("8")
    assert not terminated and info["metrics"]["action_is_valid"] == 0.0


def test_skyrl_gym(tmp_path) -> None:
    pytest.importorskip("skyrl_gym")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"prompt": "2 + 2?", "reward_spec": {"ground_truth": "4"}, "max_turns": 3, "extra_info": {}}) + "\n"
    )
    env = SkyRlGymEnv("gsm8k_multi_turn", str(rows))
    assert env.reset(0)[0] == "2 + 2?"
    text, reward, terminated, _, _ = env.step("#### 5")
    assert "final answer" in text or "answer" in text
    assert 0 < reward < 0.1 and not terminated
    assert env.step("#### 4")[1:3] == (1.0, True)


def test_openenv_over_a_socket() -> None:
    pytest.importorskip("websockets")
    from websockets.sync.server import serve

    def handle(socket) -> None:
        for text in socket:
            message = json.loads(text)
            if message["type"] == "close":
                return
            said = message["data"].get("message")
            if said == "die":
                socket.close()
                return
            data = {"observation": {"text": said}, "reward": 1.0, "done": said == "bye"}
            socket.send(json.dumps({"type": "observation", "data": data}))

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with closing(
            OpenEnvServer(f"http://127.0.0.1:{server.socket.getsockname()[1]}", observation_key="text")
        ) as env:
            env.reset(1)
            assert env.step("hi")[:3] == ("hi", 1.0, False) and env.step("bye")[2]
            with pytest.raises(ConnectionError, match="the connection is lost"):
                env.step("die")
            assert env.reset(2)[0] == "None"
        server.shutdown()


def test_mcp_server_of_the_package(tmp_path) -> None:
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(
        "try:\n"
        "    from mcp.server.fastmcp import FastMCP\n"
        "except ImportError:\n"
        "    from mcp.server import MCPServer as FastMCP\n"
        "server = FastMCP('sums')\n"
        "@server.tool()\n"
        "def add(a: int, b: int) -> int:\n"
        "    'Add two numbers.'\n"
        "    return a + b\n"
        "@server.tool()\n"
        "def fail() -> str:\n"
        "    'Fail.'\n"
        "    raise RuntimeError('it failed')\n"
        "server.run()\n"
    )
    with closing(McpClient([sys.executable, str(script)], seconds=60.0)) as client:
        tools = {tool["function"]["name"]: tool["function"] for tool in client.tools()}
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["required"] == ["a", "b"]
        assert client.call("add", {"a": 2, "b": 3}) == "5"
        with pytest.raises(ValueError, match="fail"):
            client.call("fail", {})
