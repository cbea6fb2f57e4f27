"""The MCP client against a small server: tools, calls, failures, and servers that hang or die."""

import asyncio
import json
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from envs.mcp import McpClient
from envs.tools import ToolsEnv
from spmd_rl.config.load import load
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.sidecar import LocalEnvironments
from spmd_rl.types import SessionLost

COMMAND = [sys.executable, "-S", str(Path(__file__).with_name("mcp_server.py"))]


def test_tools_are_listed_over_pages_and_called() -> None:
    with closing(McpClient(COMMAND)) as client:
        tools = {tool["function"]["name"]: tool["function"] for tool in client.tools()}
        assert list(tools) == ["add", "fail", "sleep", "die"]
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["properties"]["a"] == {"type": "number"}
        assert tools["sleep"]["parameters"] == {"type": "object", "properties": {}}
        assert client.call("add", {"a": 1, "b": 2}) == "3\n[image]"
        with pytest.raises(ValueError, match="it failed"):
            client.call("fail", {})
        with pytest.raises(ValueError, match="no such tool"):
            client.call("unknown", {})
    client.close()


def test_a_server_that_hangs_or_dies_is_started_again() -> None:
    with closing(McpClient(COMMAND, seconds=0.5)) as client:
        with pytest.raises(TimeoutError, match="gave no reply in time"):
            client.call("sleep", {})
    with closing(McpClient(COMMAND)) as client:
        with pytest.raises(ConnectionError, match="has ended"):
            client.call("die", {})
        assert client.call("add", {"a": 1, "b": 1}).startswith("2")


def start(tmp_path: Path, source: str, seconds: float = 20.0) -> McpClient:
    script = tmp_path / "my_server.py"
    script.write_text(source)
    return McpClient([sys.executable, "-S", str(script)], seconds)


@pytest.mark.parametrize(
    "source",
    [
        "import no_such_module",
        "import sys; input(); sys.stderr.write('x' * 10**6 + '\\nModuleNotFoundError'); sys.exit(1)",
    ],
)
def test_a_server_that_dies_is_named_with_its_last_words(tmp_path: Path, source: str) -> None:
    with closing(start(tmp_path, source)) as client, pytest.raises(ConnectionError) as died:
        client.tools()
    assert "my_server.py` has ended with code 1: ModuleNotFoundError" in str(died.value)
    assert len(str(died.value)) < 3000


def test_a_line_without_end_is_no_line(tmp_path: Path) -> None:
    """It is neither kept nor waited for."""
    with closing(start(tmp_path, "while True: print('x' * 65536, end='')")) as client:
        with pytest.raises(ConnectionError, match="sent a line of over 16777216 bytes"):
            client.tools()


@pytest.mark.parametrize(
    "source", ["import os, time; os.close(2); time.sleep(60)", "while True: print('{}', flush=True)"]
)
def test_a_server_that_says_much_or_nothing_is_given_up_in_time(tmp_path: Path, source: str) -> None:
    with (
        closing(start(tmp_path, source, 1.0)) as client,
        pytest.raises(TimeoutError, match="my_server.py` gave no reply"),
    ):
        client.call("add", {"text": "x" * 10**6})


def test_a_deep_line_is_passed_over(tmp_path: Path) -> None:
    source = "print('[' * 100_000, flush=True)\n" + Path(COMMAND[-1]).read_text()
    with closing(start(tmp_path, source)) as client:
        assert client.call("add", {"a": 1, "b": 2}).startswith("3")


def test_an_environment_offers_a_server_s_tools() -> None:
    env = ToolsEnv(tools=["calculator"], kinds=["chain"], mcp=COMMAND)
    with closing(env):
        names = [tool["function"]["name"] for tool in env.reset(1)[1]["tools"]]
        assert names == ["calculator", "add", "fail", "sleep", "die"]
        assert env.step('{"name": "add", "arguments": {"a": 2, "b": 2}}')[0] == "4\n[image]"
        text, _, ended, _, info = env.step('{"name": "fail", "arguments": {}}')
        assert text == "error: it failed" and not ended and info["metrics"]["tool_failures"] == 1.0
        assert env.step('{"name": "add", "arguments": {"a": 2, "b": 3}}')[0] == "5\n[image]"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (COMMAND, r"^the MCP server `.*mcp_server.py` has ended with code 1: out of luck"),
        (["no-such-program"], "^the MCP server `no-such-program` cannot be started: No such file or directory$"),
    ],
)
def test_a_server_that_is_lost_loses_the_episode_and_is_not_the_model_s_mistake(command: list[str], why: str) -> None:
    given = ["env.ask.target=envs.tools:ToolsEnv", f"env.ask.args={{tools: [calculator], mcp: {json.dumps(command)}}}"]
    cfg = load("agentic", AgenticConfig, [*given, "policy.model=none"])

    async def played() -> None:
        session = await environments.reset("ask", 1)
        await session.step('{"name": "die", "arguments": {}}')

    with closing(LocalEnvironments(cfg.env)) as environments, pytest.raises(SessionLost) as lost:
        asyncio.run(played())
    assert re.search(why, lost.value.detail) and lost.value.reason == "error", lost.value.detail
