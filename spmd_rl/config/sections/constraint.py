"""The grammar of answers: `rollout.constraint`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.config.values import require

UNREAD = (
    *("allOf", "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not"),
    *("patternProperties", "propertyNames", "then", "uniqueItems"),
)
"""Keywords of JSON Schema that the grammar compiler ignores or weakens"""
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
)
LOOKS = re.compile(r"\(\?[^:]|\\[1-9bB]")
DATA = ("const", "default", "enum", "examples", "required")


@dataclass
class ConstraintConfig:
    """Grammar that every answer must match: at most one of the three. Logprobs, entropies and losses cover the tokens
    that may follow; an answer ends when complete, or at its token limit."""

    json_schema: str | None = None
    """A JSON schema or its file. Objects have exactly the schema's keys, in order, on one line as `json.dumps` writes.
    """
    regex: str | None = None
    """A regular expression for the whole answer, without lookaround, backreferences or named groups."""
    choice: list[str] = field(default_factory=list)
    """Texts to choose the answer from, such as `[yes,no]`."""

    @property
    def given(self) -> tuple[str, str] | None:
        """Given key and its value as text; None without any."""
        texts = {"json_schema": self.json_schema, "regex": self.regex, "choice": json.dumps(self.choice)}
        return next(((key, text) for key, text in texts.items() if text not in (None, "[]")), None)

    def __post_init__(self) -> None:
        several = [key for key, value in vars(self).items() if value not in (None, [])]
        require(len(several) < 2, f"{' and '.join(several)}: only one of them can be given")
        require("" not in self.choice, "choice: must not contain an empty text")
        try:
            re.compile(self.regex or "")
        except re.error as error:
            raise UserError(f"regex: {error}") from None
        if self.json_schema is not None:
            self.json_schema = json.dumps(_schema(self.json_schema))


def _schema(text: str) -> Any:
    try:
        is_given = text.lstrip().startswith("{")
        schema = json.loads(text if is_given else Path(text).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"json_schema: {text}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"json_schema: not JSON ({error})") from None
    require(isinstance(schema, dict), "json_schema: must be an object, such as {type: object, properties: ...}")
    unkept = next(_unkept(schema), None)
    require(unkept is None, f"json_schema: {unkept} cannot be enforced; leave it out")
    return schema


def _unkept(schema: Any) -> Iterator[str]:
    parts = enumerate(schema) if isinstance(schema, list) else schema.items() if isinstance(schema, dict) else ()
    for key, value in parts:
        of_text = key in ("format", "pattern")
        unknown = of_text and (value not in FORMATS if key == "format" else LOOKS.search(str(value)))
        if key in UNREAD or unknown or (of_text and {"minLength", "maxLength"} & schema.keys()):
            yield f"{key} {value!r}" if unknown else f"{key} together with a length" if of_text else key
        elif key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            # The keys of `properties` are names, not keywords.
            yield from _unkept(list(value.values()))
        elif key not in DATA:
            yield from _unkept(value)
