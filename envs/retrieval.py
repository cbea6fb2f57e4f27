"""Search over a small set of texts: BM25, as in Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009).

Bm25(["a red shoe", "a blue hat"]).search("blue hats", 10)    # [1]
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log

_WORD = re.compile(r"[a-z0-9]+")


def words(text: str) -> list[str]:
    """Return the words and numbers of a text in small letters, without the `s` of plurals."""
    found = _WORD.findall(text.lower())
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in found]


def phrases(text: str) -> tuple[str, ...]:
    """Return the parts of a text between commas."""
    return tuple(text.split(", "))


class Bm25:
    """An immutable index, which threads may share."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        """Build the index. `k1` saturates repeated words, `b` penalises long texts."""
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """Pairs (index of the text, weight of the word in it), by word."""
        counts = [Counter(words(text)) for text in texts]
        mean = sum(count.total() for count in counts) / max(1, len(counts)) or 1.0
        for i, count in enumerate(counts):
            norm = k1 * (1 - b + b * count.total() / mean)
            for word, number in count.items():
                self._postings[word].append((i, number * (k1 + 1) / (number + norm)))
        for word, found in self._postings.items():
            idf = log(1 + (len(counts) - len(found) + 0.5) / (len(found) + 0.5))
            self._postings[word] = [(i, idf * weight) for i, weight in found]
        # Without it a lookup would add an empty entry, and the shared index would change.
        self._postings.default_factory = None

    def search(self, query: str, limit: int) -> list[int]:
        """Return the indices of at most `limit` texts that share a word with the query, the best first, equal ones in
        order.
        """
        scores: dict[int, float] = defaultdict(float)
        for word in words(query):
            for i, weight in self._postings.get(word, ()):
                scores[i] += weight
        return sorted(scores, key=lambda i: (-scores[i], i))[:limit]
