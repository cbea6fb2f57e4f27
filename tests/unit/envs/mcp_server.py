"""A small MCP server over stdin and stdout, with a few bad manners: noise on stdout, a question of its own, pages."""

import json
import sys
import time

TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
    {"name": "fail", "description": "Always fails."},
    {"name": "sleep"},
    {"name": "die"},
]


def send(**message) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def result(method: str, params: dict) -> dict:
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {}}
    if method == "tools/list":
        return {"tools": TOOLS[2:]} if params.get("cursor") == "2" else {"tools": TOOLS[:2], "nextCursor": "2"}
    name, given = params["name"], params["arguments"]
    if name == "die":
        sys.exit("out of luck")
    if name == "sleep":
        time.sleep(60)
    if name == "fail":
        return {"content": [{"type": "text", "text": "it failed"}], "isError": True}
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}, {"type": "image", "data": ""}]}


initialized = False
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "notifications/initialized":
        initialized = True
    elif "method" in message:
        print("a log line that does not belong here", flush=True)
        send(id="mine", method="ping")
        send(method="notifications/message", params={})
        if message["method"] != "initialize" and not initialized:
            send(id=message["id"], error={"code": -32002, "message": "not initialized"})
        elif message.get("params", {}).get("name") == "unknown":
            send(id=message["id"], error={"code": -32602, "message": "no such tool"})
        else:
            send(id=message["id"], result=result(message["method"], message["params"]))
