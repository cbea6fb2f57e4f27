"""Rows of the standard benchmarks, as their authors publish them, are read and judged as they come."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rewards.code import CodeReward
from rewards.ifeval import IfevalReward
from rewards.math_verify import MathReward
from spmd_rl.config.schema import DataConfig
from spmd_rl.data import Prompts
from spmd_rl.sandbox import open_sandbox
from spmd_rl.types import AnswerInfo

DATA = Path(__file__).parents[3] / "shared" / "data"
ROWS = {
    "gsm8k": ({"question": "2 + 3 * 5?", "answer": "3 * 5 = <<3*5=15>>15\n2 + 15 = 17\n#### 17"}, "\\boxed{17}", "16"),
    "math500": (
        {
            "problem": "Simplify $\\frac{2}{4}$.",
            "solution": "It is $\\boxed{\\frac{1}{2}}$.",
            "answer": "\\frac{1}{2}",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        },
        "So \\boxed{0.5}.",
        "\\boxed{2}",
    ),
    "aime": ({"ID": "2024-I-1", "problem": "Find n.", "answer": 204, "solution": "..."}, "\\boxed{204}", "\\boxed{24}"),
    "humaneval": (
        {
            "task_id": "HumanEval/x",
            "prompt": 'def double(n: int) -> int:\n    """Twice n."""\n',
            "entry_point": "double",
            "canonical_solution": "    return 2 * n\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
        },
        "```python\ndef double(n: int) -> int:\n    return 2 * n\n```",
        "```python\ndef double(n: int) -> int:\n    return n\n```",
    ),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Write a line without a comma.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        },
        "A line without one",
        "Well, no",
    ),
}
REWARDS = {"math": MathReward, "code": lambda: CodeReward(open_sandbox("none", "here")), "ifeval": IfevalReward}


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmarks_row_is_scored_as_it_comes(tmp_path: Path, name: str) -> None:
    row, right, wrong = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = Prompts.load(DataConfig(eval=str(tmp_path / "rows.jsonl")), trains=False).eval
    judge = REWARDS[prompt.domain]()
    verdicts = [judge.score(prompt, answer, AnswerInfo(9, "stop")) for answer in (right, wrong)]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0]
    if prompt.domain == "math":
        assert verdicts[0].answer and verdicts[0].answer != verdicts[1].answer


def test_results_of_one_value_are_one_vote() -> None:
    (prompt,) = (p for p, *_ in list(MathReward.examples())[:1])
    votes = [
        MathReward().score(prompt, answer, AnswerInfo(9, "stop")).answer
        for answer in ("\\boxed{0.25}", "\\boxed{\\frac{1}{4}}", "so it is 1/4", "\\boxed{0.250}", "\\boxed{4}")
    ]
    assert votes == ["1/4"] * 4 + ["4"]


@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is absent")
def test_several_benchmarks_are_one_evaluation() -> None:
    files = f"{DATA}/gsm8k/test.jsonl,{DATA}/ifeval/prompts.jsonl"
    prompts = Prompts.load(DataConfig(eval=files, keys={"id": None}), trains=False).eval
    domains = [prompt.domain for prompt in prompts]
    assert (domains.count("math"), domains.count("ifeval")) == (1319, 541)


def test_a_wrong_row_is_one_line_with_file_and_line_before_torch_is_imported(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?"}\n')
    code = (
        "import sys; from spmd_rl import evaluate; from spmd_rl.config import EvaluateConfig;"
        "from spmd_rl.config.load import load; from spmd_rl.base.errors import UserError\n"
        f"try: evaluate.run(load('evaluate', EvaluateConfig, ['data=jsonl_math', 'data.eval={rows}']))\n"
        "except UserError as error: print(error, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.startswith(f"data.eval: {rows}:2: needs `ground_truth` or `answer`;") and told.endswith(" False\n")
