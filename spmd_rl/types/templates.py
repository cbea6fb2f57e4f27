"""Templates: texts in which `{name}` is replaced. Other braces, LaTeX's included, are plain text."""

import re
from collections.abc import Sequence

_FIELD = re.compile(
    r"\\(?!n\b)[a-zA-Z]+(?:\[[^][]*\])?(?:\{[^{}]*\})+"  # \frac{a}{b}, but not a line break (\n) before a field
    r"|\b\w_\{[^{}]*\}|\^\{[^{}]*\}"  # x_{i}, 2^{n}
    r"|(\{\s*[^\W\d]\w*(?:[.\[!:][^{}\s]*)?\s*\})"
)


def unknown_fields(template: str, known: Sequence[str]) -> list[str]:
    """Return each field of a template, with its braces, that is not among the `known` names, once."""
    found = dict.fromkeys(match[1] for match in _FIELD.finditer(template) if match[1])
    return [field for field in found if field[1:-1] not in known]
