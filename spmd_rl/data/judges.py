"""Reads the tests of programs and the instructions of rows without a ground truth.

Datasets write tests in several forms, also as JSON or as a Python literal. All become the input of
`rewards.code:CodeReward`: `test_cases`, a list of inputs and outputs that are texts, and `test_case_function`.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"], "fn_name": "add"}           APPS, TACO; ground truths of verl and PRIME
    {"test_cases": [{"input": [1, 2], "output": 3, "fn_name": "add"}]}    TRL's and PRIME's `verification_info`
    [{"input": ["1 2", "3 4"], "output": ["3", "7"]}]                     lists of lines

RLVR-IFEval's ground truth, `{"func_name": ..., "N": ...}`, becomes an `instruction_id_list` with its `kwargs`.
"""

import json
from ast import literal_eval
from contextlib import suppress
from typing import Any

from spmd_rl.data.fields import BrokenRow, from_json, kind, spelled

SOURCES = ("test_cases", "verification_info", "input_output", "tests", "ground_truth")
"""Columns that may hold tests, in order of precedence"""
INPUT, OUTPUT = ("input", "stdin"), ("output", "expected_stdout")


def read_judge(data: dict[str, Any]) -> str:
    """Normalise the row's instructions and tests; return the tests' column, which is then no ground truth. BrokenRow
    for tests of an unknown form.
    """
    if data.get("instruction_id_list"):
        _read_instructions(data)
    truths = data.get("reward_model")
    if "ground_truth" not in data and isinstance(truths, dict) and truths.get("ground_truth") is not None:
        data["ground_truth"] = truths["ground_truth"]
    if isinstance(truth := _opened(data.get("ground_truth")), dict) and "func_name" in truth:
        data |= {"instruction_id_list": [truth.pop("func_name")], "kwargs": [truth]}
        return "ground_truth"
    found = () if data.get("test") else ((name, _cases(data[name], name)) for name in SOURCES if data.get(name))
    name, cases = next(((name, cases) for name, cases in found if cases is not None), ("", None))
    if cases is None:
        return ""
    # A row has one `test_case_function`, so its tests must agree on it.
    functions = {case.get("fn_name") or "" for case in cases}
    if len(functions) > 1:
        raise BrokenRow(f"`{name}` calls more than one function")
    function = data.get("test_case_function") or functions.pop()
    function = "" if function == "None" else function
    pairs = [(_part(case, INPUT), _part(case, OUTPUT)) for case in cases]
    if function and all(isinstance(output, list) and len(output) == 1 for _, output in pairs):
        # APPS wraps the result of a function into a list of one.
        pairs = [(given, output[0]) for given, output in pairs]
    data["test_cases"] = [
        {
            "input": _text(given, function, f"{name}[{number}]", "\n"),
            "output": _text(result, function, f"{name}[{number}]"),
        }
        for number, (given, result) in enumerate(pairs)
    ]
    if function:
        data["test_case_function"] = function
    return name


def _cases(value: Any, name: str) -> list[dict[str, Any]] | None:
    value = _opened(value)
    if isinstance(value, dict) and "test_cases" in value:
        value = _opened(value["test_cases"])
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        inputs, outputs = value["inputs"], value["outputs"]
        if not inputs or len(inputs) != len(outputs):
            raise BrokenRow(f"`{name}` has {len(inputs)} inputs and {len(outputs)} outputs: needs as many of each")
        pairs = zip(inputs, outputs, strict=True)
        value = [{"input": one, "output": other, "fn_name": value.get("fn_name")} for one, other in pairs]
    if not isinstance(value, list) or not value or not all(isinstance(case, dict) for case in value):
        return None
    return None if any(_part(case, INPUT) is None or _part(case, OUTPUT) is None for case in value) else [*value]


def _opened(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        for read in (json.loads, literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                return read(value)
    return value


def _part(case: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((case[name] for name in names if case.get(name) is not None), None)


def _text(value: Any, function: str, where: str, between: str = "") -> str:
    """Return an input or a result as text: lines for a program, JSON for a function."""
    if isinstance(value, str):
        return value
    if function:
        parts = value if between and isinstance(value, list) else [value]
        return between.join(map(json.dumps, parts))
    lines = value if isinstance(value, list) else [value]
    if odd := [line for line in lines if isinstance(line, bool) or not isinstance(line, str | int | float)]:
        raise BrokenRow(f"`{where}` has {kind(odd[0])} where a line is expected")
    return "\n".join(line if isinstance(line, str) else spelled(line) for line in lines)


def _read_instructions(data: dict[str, Any]) -> None:
    names, kwargs = (
        from_json(data[name], name) if isinstance(data.get(name), str) else data.get(name)
        for name in ("instruction_id_list", "kwargs")
    )
    if not isinstance(names, list):
        raise BrokenRow(f"`instruction_id_list` is {kind(names)}, not a list")
    if "kwargs" in data:
        kwargs = [from_json(one, "kwargs") if isinstance(one, str) else one for one in kwargs or ()]
        if len(kwargs) != len(names) or not all(one is None or isinstance(one, dict) for one in kwargs):
            raise BrokenRow("`kwargs` needs an object for each of `instruction_id_list`")
        data["kwargs"] = kwargs
    data["instruction_id_list"] = names
