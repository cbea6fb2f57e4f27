"""A user's mistake is one clear line, the last thing printed, and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    (toy.path / "broken.jsonl").write_text('{"prompt": "a", "ground_truth": "1", "domain": "toy"}\n{"prompt": 3\n')
    row = '{"id": "x", "prompt": "%s", "ground_truth": "1", "domain": "toy"}\n'
    (toy.path / "twice.jsonl").write_text(row % "a" + row % "b")
    lines = ['{"prompt": "a%d", "ground_truth": "1", "domain": "nowhere"}' % i for i in range(9)]
    (toy.path / "elsewhere.jsonl").write_text("\n".join(lines))
    return toy


def door(toy: Toy, *overrides: str, env: dict | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "spmd_rl.rlvr", *toy.settings(), f"run.dir={toy.path}/run", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, lines[-1] if lines else ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.temprature=1"], ["rollout.temprature", "rollout.temperature"]),
        (["steps=many"], ["steps", "many"]),
        (["policy.model=/no/such/dir"], ["policy.model", "/no/such/dir"]),
        (["data.train={path}/broken.jsonl"], ["broken.jsonl:2"]),
        (["data.train={path}/twice.jsonl"], ["twice.jsonl", "x", "1", "2"]),
        (["data.train={path}/elsewhere.jsonl"], ["nowhere"]),
        (["reward.toy.target=no.such:Reward"], ["reward.toy.target", "no.such"]),
        (["reward.toy.target=tests.e2e.toy_reward:Missing"], ["reward.toy.target", "Missing"]),
        (["reward.toy.args.slep=1"], ["reward.toy", "slep"]),
        (["engine.tp=2"], ["engine.tp"]),
        (["train.tp=3"], ["train.tp"]),
        (["rollout.temperature=-1"], ["rollout.temperature", "-1"]),
        (["rollout.max_prompt_tokens=4"], ["rollout.max_prompt_tokens=4"]),
        (["algorithm=grop"], ["grop", "grpo"]),
        (["--multirun"], ["multirun"]),
    ],
)
def test_one_clear_line_and_exit_code_2(toy: Toy, overrides: list[str], words: list[str]) -> None:
    code, line = door(toy, *(o.format(path=toy.path) for o in overrides))
    assert code == 2, line
    for word in words:
        assert word in line, line
    if not overrides[0].startswith("--") and "error.txt" in os.listdir(toy.path / "run"):
        assert line.split(": ", 1)[-1].strip() in Path(toy.path / "run" / "error.txt").read_text()


def test_debug_runs_the_whole_loop_in_one_process_with_breakpoints(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(
        "import os\n"
        "from tests.e2e.toy_reward import ParityReward\n"
        "class Stopping(ParityReward):\n"
        "    def score(self, prompt, answer, info):\n"
        "        with open(os.environ['PIDS'], 'a') as f: f.write(f'{os.getpid()}\\n')\n"
        "        breakpoint()\n"
        "        return super().score(prompt, answer, info)\n"
    )
    command = [sys.executable, "-m", "spmd_rl.rlvr", *toy.settings(), f"run.dir={tmp_path}/run", "debug=true"]
    command += ["steps=1", "eval.every=0", "reward.toy.target=stopping:Stopping"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "PIDS": f"{tmp_path}/pids"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = process.communicate("p 6*7\n" + "c\n" * 400, timeout=120)
    assert process.returncode == 0, out[-3000:]
    assert "(Pdb) 42" in out
    assert set((tmp_path / "pids").read_text().split()) == {str(process.pid)}


def test_debug_on_two_ranks_is_refused(toy: Toy) -> None:
    code, line = door(toy, "debug=true", env={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})
    assert code == 2 and "debug" in line


def test_a_reward_in_one_file_of_the_users_own(toy: Toy, tmp_path: Path) -> None:
    """README's example, as it stands there."""
    readme = (ROOT / "README.md").read_text()
    source = readme.split("<!-- my_reward.py -->")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "my_reward.py").write_text(source)
    command = [sys.executable, "-m", "spmd_rl.rlvr", *toy.settings(), f"run.dir={tmp_path}/run", "steps=1"]
    command += ["reward.toy.target=my_reward:ShortAnswer", "rollout.filter.zero_variance=false"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
