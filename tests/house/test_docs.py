"""The documentation: every link leads somewhere, pages keep to their size, measurements are dated."""

import re
from pathlib import Path

import pytest

from tests.house.sources import ROOT, rel

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").glob("*.md")])
MOST_LINES = {"README.md": 170, "docs/QUICKSTART.md": 100, "docs/RESULTS.md": 150}


def _without_code(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", _without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=rel)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _without_code(page))):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(target)
    assert not broken, broken


def test_every_file_named_in_a_page_exists() -> None:
    """But in dated measurements, which tell what was."""
    named = re.compile(r"(?<![\w/])(?:spmd_rl|tests|configs|launch)/[\w/.-]*(?:\.\w+|/)")
    gone = [
        f"{rel(page)}: {name}"
        for page in PAGES
        if page.parent.name != "lab"
        for text in re.findall(r"`([^`\n]+)`", page.read_text())
        for name in named.findall(text)
        if "NAME" not in name and not (ROOT / name).exists()
    ]
    assert not gone, "\n".join(gone)


def test_pages_keep_to_their_size() -> None:
    long = {name: n for name, most in MOST_LINES.items() if (n := (ROOT / name).read_text().count("\n")) > most}
    assert not long


def test_measurements_are_dated_and_found_from_the_results() -> None:
    files = sorted((ROOT / "lab").glob("20*"))
    assert files and all(re.fullmatch(r"20\d\d-\d\d-\d\d-[a-z0-9-]+\.md", path.name) for path in files)
    results = (ROOT / "docs" / "RESULTS.md").read_text()
    assert not [path.name for path in files if f"(../lab/{path.name})" not in results]
