"""The MCP client against a small server: tools, calls, failures, and servers that hang or die."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from envs.mcp import McpClient
from envs.tools import ToolsEnv

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


def test_an_environment_offers_a_server_s_tools() -> None:
    env = ToolsEnv(tools=["calculator"], kinds=["chain"], mcp=COMMAND)
    with closing(env):
        names = [tool["function"]["name"] for tool in env.reset(1)[1]["tools"]]
        assert names == ["calculator", "add", "fail", "sleep", "die"]
        assert env.step('{"name": "add", "arguments": {"a": 2, "b": 2}}')[0] == "4\n[image]"
        text, _, ended, _, info = env.step('{"name": "fail", "arguments": {}}')
        assert text == "error: it failed" and not ended and info["metrics"]["tool_failures"] == 1.0
        assert env.step('{"name": "die", "arguments": {}}')[0].startswith("error: ConnectionError(")
        assert env.step('{"name": "add", "arguments": {"a": 2, "b": 3}}')[0] == "5\n[image]"
