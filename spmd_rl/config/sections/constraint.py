"""What every answer must parse as: `rollout.constraint`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.config.values import require
from spmd_rl.errors import UserError

UNREAD = (
    *("allOf", "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not"),
    *("patternProperties", "propertyNames", "then", "uniqueItems"),
)
"""Keywords of JSON Schema that the compiler of grammars passes over, or takes for something weaker"""
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
)
NAMES = ("properties", "$defs", "definitions")
"""Keywords under which keys are names"""
VALUES = ("const", "default", "enum", "examples", "required")
"""Keywords under which no schema stands"""


@dataclass
class ConstraintConfig:
    """What every answer must parse as; one of the three at most. An answer ends where it is whole, and one that is cut
    off at its token limit is the exception. All logprobs, entropies and losses are those of the tokens that may follow.
    """

    json_schema: str | None = None
    """A JSON schema, or the file that holds it. Objects have their keys in the schema's order and no others, and are
    written on one line as `json.dumps` does."""
    regex: str | None = None
    """A regular expression that the whole answer must match; without lookaround, backreferences or named groups."""
    choice: list[str] = field(default_factory=list)
    """Texts of which the answer is one, such as `[yes,no]`."""

    @property
    def given(self) -> tuple[str, str] | None:
        """Which key is given, and its value as one text; None where there is no constraint."""
        texts = {**vars(self), "choice": json.dumps(self.choice) if self.choice else None}
        return next(((key, text) for key, text in texts.items() if text is not None), None)

    def __post_init__(self) -> None:
        several = [key for key, value in vars(self).items() if value not in (None, [])]
        require(len(several) < 2, f"{several[-1:] and several[-1]}: only one of {', '.join(several)} can be given")
        require("" not in self.choice, "choice: an empty text is no answer")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise UserError(f"regex: {error}") from None
        if self.json_schema is not None:
            self.json_schema = json.dumps(_schema(self.json_schema))


def _schema(text: str) -> Any:
    """The schema that is given, or that stands in the file of that name."""
    try:
        read = text if text.lstrip().startswith("{") else Path(text).expanduser().read_text(encoding="utf-8")
        schema = json.loads(read)
    except OSError as error:
        raise UserError(f"json_schema: {text}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"json_schema: no JSON ({error})") from None
    require(isinstance(schema, dict), "json_schema: must be an object, such as {type: object, properties: ...}")
    unkept = next(_unkept(schema), None)
    require(unkept is None, f"json_schema: {unkept} cannot be kept to; it must be left out")
    return schema


def _unkept(schema: Any) -> Iterator[str]:
    """Yield what the compiler of grammars would not keep to, in a schema and in those within it."""
    if isinstance(schema, list):
        for part in schema:
            yield from _unkept(part)
    if not isinstance(schema, dict):
        return
    bounds, looks = {"minLength", "maxLength"} & schema.keys(), re.compile(r"\(\?[^:]|\\[1-9bB]")
    for key, value in schema.items():
        unknown = key == "format" and value not in FORMATS
        if key in UNREAD or unknown or (key == "pattern" and looks.search(str(value))):
            yield f"{key} {value!r}" if key in ("format", "pattern") else key
        elif key in ("format", "pattern") and bounds:
            yield f"{key} beside {min(bounds)}"
        elif key in NAMES and isinstance(value, dict):
            yield from _unkept(list(value.values()))
        elif key not in VALUES:
            yield from _unkept(value)
