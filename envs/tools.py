"""A question and tools: Python in the sandbox, search over a corpus, a calculator, and those of an MCP server.

The seed draws the question. An action is a tool call (see `envs.tool_calls`), whose reply is the tool's result or
error, or a text: the answer, which ends the episode. The right answer is worth 1.0.

    env.ask.target=envs.tools:ToolsEnv env.ask.args.tools=[search,calculator] env.ask.args.kinds=[lookup]
    env.ask.args.mcp=[python,my_server.py]
    env.ask.args.corpus=passages.jsonl env.ask.args.questions=questions.jsonl

A corpus of your own is JSONL with `text` (and `title`), questions are JSONL with `question` and `answer`.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from spmd_rl.types import RunLimits, Sandbox

from .calculator import calculate
from .mcp import McpClient
from .retrieval import Bm25
from .rows import read_rows
from .tool_calls import Toolbox
from .tool_tasks import KINDS, Task, Town, is_right, make_corpus, make_towns

INSTRUCTION = """Answer the question. You have tools: call one, read its result, and go on until you know the answer.
A turn that calls no tool is your answer: give it alone."""
AGGREGATION = {"success": "last", "answered": "last", "tool_calls": "sum", "tool_failures": "sum"}


class ToolsEnv:
    """An environment with one question an episode; its metrics are success, answered, tool calls and their failures."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        tools: Sequence[str] = ("python", "search", "calculator"),
        kinds: Sequence[str] = tuple(KINDS),
        corpus: str = "",
        questions: str = "",
        mcp: Sequence[str] = (),
        corpus_seed: int = 0,
        python_seconds: float = 9.0,
        results: int = 3,
        max_characters: int = 2000,
    ) -> None:
        """Configure questions and tools.

        `tools`: names among python, search, calculator. `kinds`: of generated questions, see `KINDS`; not used with
        `questions`. `mcp`: the command of a server whose tools are added. `results`: texts of one search.
        `max_characters`: limit of a tool's reply. ValueError for an unknown name or an empty file.
        """
        offered = {"python": self._python, "search": self._search, "calculator": self._calculator}
        for given, known, key in ((tools, offered, "tools"), (kinds, KINDS, "kinds")):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"{key}: unknown {unknown[0]}; known are {', '.join(known)}")
        self._sandbox, self._limits = sandbox, RunLimits(wall_seconds=python_seconds)
        self._kinds, self._results, self._most = tuple(kinds), results, max_characters
        self._texts, self._index, self._towns = _library(corpus, corpus_seed)
        self._questions = _questions(questions) if questions else ()
        # The docstrings of these three methods are the descriptions that the model reads.
        self._own: dict[str, Callable[..., Any]] = {name: offered[name] for name in tools}
        self._mcp = McpClient(mcp) if mcp else None
        self._tools: Toolbox | None = None
        self._task = Task("", "")
        self._called, self._answered = 0, False

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw a question. The first reset starts the MCP server and lists its tools."""
        if self._tools is None:
            self._tools = self._build_toolbox()
        self._called, self._answered = 0, False
        if self._questions:
            self._task = self._questions[seed % len(self._questions)]
        else:
            rng = random.Random(seed)
            self._task = KINDS[rng.choice(self._kinds)](rng, self._towns)
        return self._task.question, {"instruction": INSTRUCTION, "tools": self._tools.schemas}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Call tools, or judge the answer."""
        assert self._tools is not None, "reset comes first"
        reply = self._tools.play(action)
        answered = self._answered = bool(reply.said)
        self._called += reply.calls
        success = float(answered and is_right(reply.said, self._task.answer))
        metrics = {
            "success": success,
            "answered": float(answered),
            "action_is_valid": float(reply.valid),
            "action_is_effective": float(reply.valid and not reply.failures),
            "tool_calls": float(reply.calls),
            "tool_failures": float(reply.failures),
        }
        text = reply.text if len(reply.text) <= self._most else f"{reply.text[: self._most]}\n[cut]"
        return text, success, answered, False, {"metrics": metrics, "metrics_agg_mode": AGGREGATION}

    def solution(self) -> list[str]:
        """Return the remaining calls and the answer: an oracle for demonstrations of generated questions."""
        return [] if self._answered else [*self._task.calls[self._called :], self._task.answer]

    def close(self) -> None:
        """End the MCP server, if there is one."""
        if self._mcp is not None:
            self._mcp.close()
        self._tools = None

    def _build_toolbox(self) -> Toolbox:
        box = Toolbox.of(self._own)
        for schema in self._mcp.tools() if self._mcp else ():
            name = schema["function"]["name"]
            box.add(schema, lambda arguments, name=name: self._mcp.call(name, arguments))
        return box

    def _python(self, code: str) -> str:
        """Run a Python program. It sees neither files nor the network, and keeps nothing between calls.

        Args:
            code: The program. What it prints is the result.
        """
        if self._sandbox is None:
            raise RuntimeError("there is no sandbox here")
        result = self._sandbox.run(code, "", self._limits)
        if result.end in ("cpu", "wall", "output"):
            limit = "printed too much" if result.end == "output" else "ran too long"
            return f"{result.stdout}error: the program {limit}"
        if result.end == "signal" or result.code:
            return f"{result.stdout}error: {result.stderr.strip()[-1000:] or f'it ended with {result.code}'}"
        return result.stdout.strip() or "(nothing was printed)"

    def _search(self, query: str) -> str:
        """Search the library.

        Args:
            query: A few words.
        """
        found = self._index.search(query, self._results)
        return "\n".join(f"[{i + 1}] {self._texts[n]}" for i, n in enumerate(found)) or "(nothing was found)"

    def _calculator(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: With + - * / // % **, brackets, and functions such as sqrt, min, max, round, floor, log.
        """
        return calculate(expression)


@cache
def _library(path: str, seed: int) -> tuple[list[str], Bm25, list[Town]]:
    """Return the texts, their index, and the towns of generated questions; once a process."""
    towns = make_towns(seed)
    texts = make_corpus(towns)
    if path:
        rows = read_rows(path)
        texts = [f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"]) for row in rows]
    return texts, Bm25(texts), towns


@cache
def _questions(path: str) -> tuple[Task, ...]:
    return tuple(Task(str(row["question"]), str(row["answer"])) for row in read_rows(path))
