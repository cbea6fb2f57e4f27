"""`--dry-run`: what it says, and that it writes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.load import CONFIGS, load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.tools.dry_run import show
from spmd_rl.tools.dry_run_pictures import show as show_pictures
from tests.models import tiny
from tests.patience import patient

REWARD = """
import asyncio, os, re, time
from spmd_rl.types import Message, Prompt, Verdict
class Boxed:
    @classmethod
    def examples(cls):
        prompt = Prompt("0" * 32, (Message("user", "?"),), "math", "4")
        yield from ((prompt, "boxed{4}", 1.0), (prompt, "4", 0.0))
    def score(self, prompt, answer, info):
        return Verdict("ok", float("boxed{" + prompt.ground_truth + "}" in answer))
class Never:
    def score(self, prompt, answer, info):
        return Verdict("ok", 0.0)
def whole(answer, ground_truth): return answer.strip() == ground_truth
def whole_and_form(answer, ground_truth): return 0.1 * ("boxed" in answer) + (answer == ground_truth)
def whole_and_short(answer, ground_truth): return float(answer == ground_truth) - 0.01 * len(answer)
def tag(answer, ground_truth): return f"<answer>{ground_truth}</answer>" in answer
def last_box(answer, ground_truth): return re.findall(r"boxed{(.*?)}", answer)[-1:] == [ground_truth]
def unique(answer): return len(set(answer))
def raises(answer): return 1 / 0
def raises_on_some(answer, ground_truth): return int(answer.split("{")[1].rstrip("}")) == int(ground_truth)
def nan(answer): return float("nan")
def sleeps(answer):
    try:
        time.sleep(60)
    except Exception:
        return 1.0
async def waits(answer): await asyncio.sleep(60)
def dies(answer): os._exit(0)
def crashes(answer): os.kill(os.getpid(), 9)
def leaves(answer): raise SystemExit(3)
class Started:
    def start(self): self.ready = True
    def score(self, prompt, answer, info): return self.ready and prompt.ground_truth in answer
class BadGold:
    def gold(self, prompt): return prompt.extra["nothing"]
    def score(self, prompt, answer, info): return 1.0
"""
EXTENDING = (Path(__file__).parents[2] / "docs/EXTENDING.md").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dry")
    tiny("llama", place / "model")
    (place / "dry_judges.py").write_text(REWARD)
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(20)] + [
        {"question": "x" * 60, "answer": "1"}
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def line(place: Path, target: str = "Boxed") -> list[str]:
    return [
        "data=jsonl_math", f"data.train={place}/rows.jsonl", "data.format={question}", f"policy.model={place}/model",
        f"reward.math.target=dry_judges:{target}", f"run.dir={place}/run", "rollout.prompts_per_step=4",
        "rollout.answers_per_prompt=2", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=8", "steps=10",
        "data.holdout=1e-9", "train.updates_per_step=2", "checkpoint.every=4",
    ]  # fmt: skip


def said(place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, target: str) -> str:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("WORLD_SIZE", "2")
    show(load("rlvr", RlvrConfig, line(place, target)))
    return " ".join(capsys.readouterr().out.split())


def test_the_arithmetic_of_a_step(place: Path, capsys, monkeypatch) -> None:
    text = said(place, capsys, monkeypatch, "Boxed")
    for part in (
        "21 for training, 0 held out",
        "math 2 of its own 2 examples score as they do with default arguments",
        "; 1 of 21 are longer (data.overlong=drop)",
        "4 prompts x 2 answers = 8 samples",
        "4 a replica, 4 a data shard",
        "2 a step of 4 samples, 20 in all; each at most 1 micro-batches of 4096 tokens a data shard",
        "5 steps make one; 10 steps use 40 prompts = 2.00",
        "after steps 4, 8, 10",
        f"run.dir {place}/run",
    ):
        assert part in text


def test_prompts_answers_and_rewards(place: Path, capsys, monkeypatch) -> None:
    text = said(place, capsys, monkeypatch, "Boxed")
    assert "<|im_start|>user 0 + 0?<|im_end|> <|im_start|>assistant" in text
    assert "\\boxed{0}<|im_end|>" in text and "reward of '2': 0 (ok)" in text
    assert "! it scores more as '\\\\boxed{0}', 1 (ok): does data.format ask for that?" in text
    assert "! this answer has 10 tokens, more than rollout.max_new_tokens=8" in text
    with pytest.raises(
        UserError, match="^reward.math.target: dry_judges:Never: no form of the ground truth is rewarded"
    ):
        said(place, capsys, monkeypatch, "Never")
    assert "! no form of the ground truth is rewarded" in " ".join(capsys.readouterr().out.split())


def test_a_share_of_0_is_evaluated_only(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    rows = [{"question": f"{i}?", "answer": str(i), "domain": "ab"[i % 2]} for i in range(20)]
    (place / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [f"reward.{domain}.target=dry_judges:Started" for domain in "ab"]
    given = [f"data.train={place}/two.jsonl", "data.mix={a: 1, b: 0}", "data.holdout=0.5", *rewards]
    show(load("rlvr", RlvrConfig, [*line(place), *given]))
    text = " ".join(capsys.readouterr().out.split())
    assert " not trained on: data.mix.b=0 " in text and "Audit a none of" in text and " b none of " in text


BOXED = "data.format={question} Think step by step, then put the final answer in \\boxed{}."


def previewed(place: Path, monkeypatch: pytest.MonkeyPatch, target: str, *given: str) -> None:
    monkeypatch.syspath_prepend(str(place))
    asks = [BOXED, f"reward.math.target={target}", "reward.math.timeout=0.3", "rollout.max_prompt_tokens=999"]
    show(load("rlvr", RlvrConfig, [*line(place), *asks, *given]))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "whole",
            r"row \w+: it rewards '0', but not 'Let me .*boxed.0.', which the prompt asks for: let the reward read",
        ),
        ("whole_and_form", "it rewards '0', but not 'Let me"),
        ("whole_and_short", "it rewards '0', but not 'Let me"),
        ("tag", "it rewards '<answer>0</answer>', but not 'Let me"),
        ("raises", r"row \w+, gold answer: error: dry_judges.py:\d+: ZeroDivisionError: division by zero \(and 2 more"),
        ("raises_on_some", "gold answer: error: dry_judges.py:.*IndexError"),
        ("nan", "gold answer: error: ValueError: score is nan"),
        ("sleeps", "gold answer: timeout: no score after 0.3 s"),
        ("waits", "gold answer: timeout: no score after 0.3 s"),
        ("BadGold", "KeyError: 'nothing'"),
        ("dies", r"^reward.math.target: dry_judges:dies: ends its process with code 0 on row \w{32}$"),
        ("crashes", r"^reward.math.target: dry_judges:crashes: ends its process by SIGKILL on row \w{32}$"),
        ("leaves", r"^reward.math.target: dry_judges:leaves: ends its process with code 3 on row \w{32}$"),
    ],
)
def test_a_reward_that_will_fail_ends_it(place: Path, capsys, monkeypatch, target: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        previewed(place, monkeypatch, f"dry_judges:{target}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("target", ["last_box", "unique", "Started", "whole"])
def test_a_reward_that_pays_an_obedient_answer_passes(place: Path, capsys, monkeypatch, target: str) -> None:
    asked = ["data.format={question} Reply with the number only."] if target == "whole" else []
    previewed(place, monkeypatch, f"dry_judges:{target}", *asked)
    text = capsys.readouterr().out
    assert ("The prompt asks for no form" in text) is bool(asked)
    assert asked or "step.\\n\\\\boxed{0}', as the prompt asks: " in text


@pytest.mark.parametrize("name", ["score", "ShortAnswer"])
def test_the_documented_reward_works_with_what_it_is_run_with(place: Path, capsys, monkeypatch, name: str) -> None:
    (place / "documented_reward.py").write_text(EXTENDING.split("# my_reward.py\n")[1].split("```")[0])
    shipped = "data.format={question}\nThink step by step, then put the final answer in \\boxed{}."
    previewed(place, monkeypatch, f"documented_reward:{name}", shipped)
    assert "boxed{0}', as the prompt asks: " + ("1 (ok)" if name == "score" else "0.") in capsys.readouterr().out


def test_it_writes_nothing_and_needs_no_torch(place: Path) -> None:
    before = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    code = "import atexit, runpy, sys; atexit.register(lambda: print('torch:', 'torch' in sys.modules));"
    code += "sys.argv[0] = 'rlvr'; runpy.run_module('spmd_rl.rlvr', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": f"{place}:{os.getcwd()}"}

    command = [sys.executable, "-c", code, "--dry-run", *line(place)]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("torch: False\n"), done.stderr
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before


def test_what_fails_ends_with_code_2_and_one_line(place: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{place}:{os.getcwd()}"}
    command = [sys.executable, "-m", "spmd_rl.rlvr", "--dry-run", *line(place, "raises")]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=patient(60))
    told = [text for text in done.stderr.splitlines() if not text.endswith(" ...")]
    assert (
        done.returncode == 2 and len(told) == 1 and told[0].startswith("error: reward.math.target: dry_judges:raises")
    )


@pytest.mark.parametrize("given", [["rollout.max_prompt_tokens=5"], ["data.overlong=error"]])
def test_a_mistake_ends_it_as_it_would_end_the_run(place: Path, given: list[str]) -> None:
    with pytest.raises(
        UserError, match=r"^rollout.max_prompt_tokens=\d+: (21|1) of 21 prompts are longer, the longest"
    ):
        show(load("rlvr", RlvrConfig, [*line(place), *given]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiment/*reward_fl*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_diffusion_models_shows_its_arithmetic(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    rows = [json.dumps({"prompt": f"{n} cats", "domain": "pictures"}) for n in range(99)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    is_demo = path.stem.startswith("demo")
    own = [] if is_demo else [f"policy.model={tmp_path}", f"data.train={tmp_path / 'rows.jsonl'}"]
    cfg = load("reward_fl", RewardFlConfig, [f"+experiment={path.stem}", *own])
    show_pictures(cfg)
    text, pictures = capsys.readouterr().out, cfg.pictures
    assert f"= {pictures.prompts_per_step * pictures.per_prompt} pictures in" in text and "sampling steps" in text
    assert ("one green square" if is_demo else "cats  (pictures: )") in text
