"""Tools for environments: reading a call from an action, describing a Python function to the model, calling it.

A call is JSON, bare or in `<tool_call>` tags, as in most chat templates; several in tags are called in order:

    {"name": "calculator", "arguments": {"expression": "2 + 2"}}

A function is described in OpenAI's schema by its type hints and its docstring, Google style: the text before `Args:`
describes the function, the lines under it its parameters.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

MAX_CALLS = 8
"""Largest number of calls in one action."""
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_SECTION = re.compile(r"^[ \t]*(?:Returns|Raises|Yields|Examples?|Notes?|Attributes):[ \t]*$", re.MULTILINE)
_PARAMETER = re.compile(r"^[ \t]*\*{0,2}(\w+)[ \t]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?[ \t]*:[ \t]*(.*)$")


def without_thoughts(text: str) -> str:
    """Return the text after the last `</think>`, up to an unclosed `<think>`, without surrounding blanks."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as an action."""
    return json.dumps({"name": name, "arguments": dict(arguments)})


class ToolsLost(ConnectionError):
    """The loss of the tools' server: the environment's failure and no reply, since the model did nothing wrong."""

    names_its_place = True
    """Marks the message as complete: adding a line of this file would not help."""


class BadCall(ValueError):
    """An impossible call: it is no JSON, the tool is unknown, or the arguments do not fit."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model requests."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(action: str) -> list[ToolCall]:
    """Return the calls in an action, none if it is a text. `BadCall`, with the reason, for a broken call.

    Text around the tags does not count. Bare JSON counts if it is the whole action: an object with a `name`, or
    OpenAI's form with a `function`, whose arguments may be a text.
    """
    tagged = _TAGGED.findall(action)
    if not tagged:
        if "<tool_call>" in action:
            raise BadCall("a <tool_call> without its end, </tool_call>")
        if not action.lstrip().startswith("{"):
            return []
        tagged = [action]
    if len(tagged) > MAX_CALLS:
        raise BadCall(f"{len(tagged)} calls in one turn, and {MAX_CALLS} is the most")
    return [_call(text) for text in tagged]


def _call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the call is not valid JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise BadCall('a call looks like {"name": "...", "arguments": {...}}')
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadCall(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise BadCall("the arguments are not an object")
    return ToolCall(found["name"], arguments)


def function_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function in OpenAI's tool schema. ValueError, which names it, without a docstring or a type hint."""
    if not (doc := inspect.getdoc(function)):
        raise ValueError(f"the tool {name} has no docstring, which would describe it to the model")
    body, _, args = doc.partition("\nArgs:")
    described = _parameters(_SECTION.split(args)[0])
    hints, properties, required = get_type_hints(function), {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the tool {name} has *{parameter.name}: each parameter of a tool has a name and a type")
        if parameter.name not in hints:
            raise ValueError(f"the tool {name} has no type hint for its parameter {parameter.name}")
        try:
            (schema,), parts = msgspec.json.schema_components([hints[parameter.name]], ref_template="#/$defs/{name}")
        except TypeError as error:
            raise ValueError(f"the tool {name}, parameter {parameter.name}: {error}") from None
        text = described.get(parameter.name)
        properties[parameter.name] = (
            schema | ({"description": text} if text else {}) | ({"$defs": parts} if parts else {})
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            properties[parameter.name]["default"] = msgspec.to_builtins(parameter.default)
    shape = {"type": "object", "properties": properties, "required": required}
    described_as = " ".join(_SECTION.split(body)[0].split())
    return {"type": "function", "function": {"name": name, "description": described_as, "parameters": shape}}


def _parameters(text: str) -> dict[str, str]:
    """Return the texts under `Args:` by parameter; a continuation line belongs to the one above."""
    found: dict[str, str] = {}
    indent, last = None, ""
    for line in text.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth <= indent and (match := _PARAMETER.match(line)):
            last = match[1]
            found[last] = match[2].strip()
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


@dataclass(frozen=True, slots=True)
class ToolReply:
    """The outcome of an action."""

    text: str
    """Results of the tools, a line or more each, or the error; empty if the action called none."""
    said: str = ""
    """Action without thoughts, if it called no tool: an answer, or a message."""
    calls: int = 0
    failures: int = 0
    """Number of calls that raised."""
    valid: bool = True
    """False for an empty action and one with an impossible call."""


@dataclass(slots=True)
class Toolbox:
    """A collection of tools by name."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Schemas in OpenAI's form, the content of `info["tools"]`."""
    _tools: dict[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, functions: Mapping[str, Callable[..., Any]]) -> "Toolbox":
        """Return a box of Python functions by name, each described by its hints and docstring."""
        box = cls()
        for name, function in functions.items():
            box.add(function_schema(name, function), _checked(name, function))
        return box

    def add(self, schema: dict[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> None:
        """Add a tool that takes its arguments as one mapping. ValueError if its name is taken."""
        name = schema["function"]["name"]
        if name in self._tools:
            raise ValueError(f"two tools have the name {name}")
        self.schemas.append(schema)
        self._tools[name] = call

    def call(self, call: ToolCall) -> Any:
        """Return the tool's result. `BadCall` if it cannot be called; the tool's own exceptions pass through."""
        if call.name not in self._tools:
            raise BadCall(f"there is no tool {call.name:.60}; there are: {', '.join(self._tools) or 'none'}")
        return self._tools[call.name](call.arguments)

    def play(self, action: str) -> ToolReply:
        """Make the calls of an action. A failure is a tool's reply, which the model reads; `ToolsLost`
        passes through.
        """
        said = without_thoughts(action)
        if not said:
            return ToolReply("error: the turn has neither a tool call nor an answer", valid=False)
        try:
            calls = read_calls(said)
        except BadCall as error:
            return ToolReply(f"error: {error}", valid=False)
        if not calls:
            return ToolReply("", said)
        texts, failures, valid = [], 0, True
        for call in calls:
            try:
                texts.append(as_text(self.call(call)))
            except ToolsLost:
                raise
            except Exception as error:  # noqa: BLE001 - a tool may fail in any way
                valid = valid and not isinstance(error, BadCall)
                failures += 1
                texts.append(f"error: {error if isinstance(error, ValueError) else repr(error)}")
        return ToolReply("\n".join(texts), "", len(calls), failures, valid)


def as_text(result: Any) -> str:
    """Return a tool's result for the model: a text unchanged, all else as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result).decode()
    except TypeError:
        return str(result)


def _checked(name: str, function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function over a mapping of JSON values, which are converted to its hints ("5" to an integer)."""
    hints, signature = get_type_hints(function), inspect.signature(function)

    def call(arguments: Mapping[str, Any]) -> Any:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise BadCall(f"{name}: {error}") from None
        values = {}
        for key, value in arguments.items():
            try:
                values[key] = msgspec.convert(value, hints[key], strict=False)
            except msgspec.ValidationError as error:
                raise BadCall(f"{name}: the argument {key}: {error}") from None
        return function(**values)

    return call
