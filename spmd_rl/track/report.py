"""The page that shows runs: one static file, and `report.html`, that page with the data of one run inside.

The page's script draws everything. Text from a model is data: the script puts it into text nodes, and the content
security policy allows no other script or server.
"""

import base64
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from spmd_rl.track.page_data import embedded, title
from spmd_rl.track.run_reader import read_run

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("dom.js", "charts.js", "overview.js", "trajectory.js", "samples.js", "live.js", "page.js")


def write_report(directory: Path, steps: Sequence[int] | None = None) -> Path:
    """Write `directory/report.html`, completely or not at all, and return its path.

    steps: those with samples; by default some, evenly spread. OSError if it cannot be written; ValueError for an
    invalid file of samples.
    """
    run, path = read_run(directory), directory / "report.html"
    # The name has process and thread: an exit callback may write the report at the same time.
    draft = path.with_name(f".report-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        draft.write_text(page(title(run), embedded(run, steps)), encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def page(name: str, data: Mapping[str, Any] | None = None) -> str:
    """Return the page, with data inside or asking its server."""
    style, script = _parts()
    # Samples could end the script element; as an escape, `<` is the same to a reader of JSON.
    inside = "" if data is None else msgspec.json.encode(data).decode().replace("<", "\\u003c")
    texts = {"title": f"{escape(name)} - spmd_rl", "style": style, "script": script, "data": inside}
    template = Template((FOLDER / "page.html").read_text("utf-8"))
    return template.substitute(texts, policy=policy(asks=data is None))


def policy(asks: bool) -> str:
    """Return the content security policy of such a page."""
    style, script = map(_source, _parts())
    connect = "connect-src 'self'; " * asks
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; {connect}"
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _parts() -> tuple[str, str]:
    script = '"use strict";\n' + "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS)
    return (FOLDER / "page.css").read_text("utf-8"), script


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
