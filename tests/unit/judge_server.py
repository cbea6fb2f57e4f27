"""A stand-in for `vllm serve`: a process that answers as a judge, and as its first argument says.

python judge_server.py MODE PORT MODEL NOTES    # NOTES: a file to which it writes what it is, once it serves
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE, PORT, MODEL, NOTES = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"mode": MODE})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = body["messages"][0]["content"]
        if "crash" in asked:
            os._exit(7)
        self.reply({"choices": [{"message": {"content": "YES" if body["model"] == MODEL else "NO"}}]})

    def reply(self, found: object) -> None:
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        print("x" * 1000)  # more than a pipe holds, if nobody reads


if MODE == "dies":
    sys.exit("no such device")
if MODE == "hangs":
    time.sleep(1000)
if MODE == "slow":
    time.sleep(1.0)
helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as vLLM's engine process: not in our group
server = ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler)
devices = {name: value for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES")}
notes = {"pids": [os.getpid(), helper.pid], "devices": devices, "rank": os.environ.get("RANK")}
with Path(NOTES).open("a") as file:
    file.write(json.dumps(notes) + "\n")
server.serve_forever()
