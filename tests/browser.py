"""The page that shows runs: the data inside a report, and the page in a headless Chromium, with pictures of it.

    python -m tests.browser RUN_DIR "step=14&ticket=113&answer=2" docs/view   # docs/view_light.png, docs/view_dark.png

The second argument is what stands behind # in the address.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.tools.view.server import ViewServer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCHEMES = {"dark": 0, "light": 1}


def data_in(page: Path) -> dict[str, Any]:
    """The data inside a report or a comparison."""
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


@contextmanager
def served(run_dir: Path) -> Iterator[ViewServer]:
    """Serve the page of a run on a thread."""
    with ViewServer(RunIndex(run_dir)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def visit(url: str, profile: Path, seconds: float = 6.0, *options: str) -> str:
    """The document after some seconds of the page's own clock. AssertionError for a message on the console."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1300,900",
    ]
    command += ["--enable-logging=stderr", f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * seconds:.0f}"]
    done = subprocess.run([*command, *(options or ["--dump-dom"]), url], capture_output=True, text=True, timeout=120)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not messages, "\n".join(messages)
    return done.stdout.partition("<body")[2].partition("<script")[0]


def picture(url: str, scheme: str, path: Path) -> None:
    """Draw the page into a PNG."""
    with tempfile.TemporaryDirectory() as profile:
        visit(
            url, Path(profile), 6.0, f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={path}"
        )


if __name__ == "__main__":
    with served(Path(sys.argv[1])) as server:
        for scheme in SCHEMES:
            picture(f"{server.url}#{sys.argv[2]}", scheme, Path(f"{sys.argv[3]}_{scheme}.png"))
