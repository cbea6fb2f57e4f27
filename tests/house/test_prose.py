"""The prose of the package and its pages as ratchets: a figure may get better than its limit, never worse."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.sources import FILES, ROOT, rel, tree

CODE = [path for path in FILES if rel(path).startswith("spmd_rl/")]
GENERATED = {"ALGORITHMS.md"}
PAGES = [p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

AT_MOST = {
    "docstrings that begin with a fragment, percent": 0.3,
    "odd words in 1,000 words of docstrings": 0.5,
    "odd words in 1,000 words of pages": 0.5,
    "odd messages in 1,000": 5,
    "docstrings under five words": 75,
    "words of docstrings": 80_000,
    "words of hand-written pages": 45_000,
    "words of the README": 900,
}
AT_LEAST = {"own-line comments, percent of lines": 1.5}

FRAGMENT = re.compile(
    r"(what|whether|how|those|of|where|who|whose|whom|that|which|as|with|for|by|from|than|in the)\b", re.IGNORECASE
)
"""First words of a relative clause or a prepositional phrase, which names no object and does nothing."""
ODD = """
    nobody whoever whatever wherever beside anew thereby therein thereof begun afresh likewise meanwhile
    stand stands stood lie lies tell tells told hear hears heard affair
    "it is none" "is none" "are none" "has it not" "of its own" "of their own" "comes of it" "what comes"
    "so many" "for so long" "as ever" "at all times"
"""
"""Words and phrases of this project's past that its peers use rarely or never."""
ODD_IN_MESSAGES = re.compile(
    r"\b((?<!there )is no|has it not|has not the|say [a-z_]+[.=]|nobody|told|lies|stands|goes on from|for want of)\b"
)
"""The same in texts for users, where an article or a verb is missing, or the program speaks."""
_PHRASES = re.compile(r"\b(" + "|".join(a or b for a, b in re.findall(r'"([^"]+)"|(\S+)', ODD)) + r")\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][\w'-]*")


def docstrings(path: Path) -> Iterator[str]:
    """Yield each string that is a statement: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text.strip()


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of at least three words that are no docstrings, with their fields as `_`: messages, mostly."""

    def texts(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant()):
                    continue
                case ast.Constant(value=str(text)):
                    yield text
                case ast.JoinedStr(values=parts):
                    yield "".join(p.value if isinstance(p, ast.Constant) else "_" for p in parts)
                case _:
                    yield from texts(child)

    yield from (text for text in texts(tree(path)) if num_words(text) >= 3 and " " in text)


def num_own_line_comments(path: Path) -> int:
    """Return the number of lines with a comment alone, without headings (`# -- sending ---`) and examples in texts."""
    texts = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and n.lineno < n.end_lineno]
    in_text = {line for node in texts for line in range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(map(str.lstrip, path.read_text().splitlines()), 1)
    return sum(line.startswith("# ") and not line.startswith("# --") and n not in in_text for n, line in lines)


def num_words(text: str) -> int:
    return len(_WORD.findall(text))


def odd_words(text: str) -> list[str]:
    return [" ".join(found.split()) for found in _PHRASES.findall(" ".join(text.split()))]


def is_fragment(text: str) -> bool:
    return bool(FRAGMENT.match(text))


@cache
def figures() -> dict[str, float]:
    """Return the measured value of each limit."""
    texts = [text for path in CODE for text in docstrings(path)]
    said = [text for path in CODE for text in messages(path)]
    pages = [path.read_text() for path in PAGES]
    words, page_words = sum(map(num_words, texts)), sum(map(num_words, pages))
    lines = sum(path.read_text().count("\n") for path in CODE)
    return {
        "docstrings that begin with a fragment, percent": 100 * sum(map(is_fragment, texts)) / len(texts),
        "odd words in 1,000 words of docstrings": 1000 * sum(len(odd_words(text)) for text in texts) / words,
        "odd words in 1,000 words of pages": 1000 * sum(len(odd_words(text)) for text in pages) / page_words,
        "odd messages in 1,000": 1000 * sum(bool(ODD_IN_MESSAGES.search(text)) for text in said) / len(said),
        "docstrings under five words": sum(num_words(text) < 5 for text in texts),
        "words of docstrings": words,
        "words of hand-written pages": sum(len(text.split()) for text in pages),
        "words of the README": len((ROOT / "README.md").read_text().split()),
        "own-line comments, percent of lines": 100 * sum(map(num_own_line_comments, CODE)) / lines,
    }


@pytest.mark.parametrize("name", AT_MOST)
def test_at_most(name: str) -> None:
    assert figures()[name] <= AT_MOST[name], worst(name)


@pytest.mark.parametrize("name", AT_LEAST)
def test_at_least(name: str) -> None:
    assert figures()[name] >= AT_LEAST[name]


def worst(name: str) -> str:
    """Return what to rewrite, for the limits of docstrings."""
    found = [(path, text) for path in CODE for text in docstrings(path)]
    if "messages" in name:
        found = [(path, text) for path in CODE for text in messages(path) if ODD_IN_MESSAGES.search(text)]
    elif "fragment" in name:
        found = [pair for pair in found if is_fragment(pair[1])]
    elif "odd" in name:
        found = [(path, f"{odd_words(text)}: {text}") for path, text in found if odd_words(text)]
    elif "five" in name:
        found = [pair for pair in found if num_words(pair[1]) < 5]
    else:
        found = sorted(found, key=lambda pair: -len(pair[1]))
    return "\n".join(f"{rel(path)}: {' '.join(text.split())[:120]}" for path, text in found[:40])


def test_the_measure_itself() -> None:
    assert is_fragment("What a claim comes to.") and is_fragment("In the batch.")
    assert not is_fragment("Return the result of `claim`.")
    assert ODD_IN_MESSAGES.search("train=x has it not") and not ODD_IN_MESSAGES.search("there is no checkpoint yet")
    assert odd_words("What comes is told to nobody.") == ["What comes", "told", "nobody"]
