"""Templates: texts with `{name}` in the place of what is filled in. Other braces, and those of LaTeX, are mere text."""

import re
from collections.abc import Sequence

_FIELD = re.compile(
    r"\\(?!n\b)[a-zA-Z]+(?:\[[^][]*\])?(?:\{[^{}]*\})+"  # \frac{a}{b}, but not a line break (\n) before a field
    r"|\b\w_\{[^{}]*\}|\^\{[^{}]*\}"  # x_{i}, 2^{n}
    r"|(\{\s*[^\W\d]\w*(?:[.\[!:][^{}\s]*)?\s*\})"
)


def unknown_fields(template: str, known: Sequence[str]) -> list[str]:
    """Return the fields of a template, with their braces, that are none of the `known` names; each once."""
    found = dict.fromkeys(match[1] for match in _FIELD.finditer(template) if match[1])
    return [field for field in found if field[1:-1] not in known]
