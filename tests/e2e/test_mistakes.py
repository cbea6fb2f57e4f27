"""A user's mistake is one clear line, the last thing printed, and exit code 2; and the line reaches every user."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Toy
from tests.e2e.test_supervised import NO_TORCH

TOLD = Path(__file__).with_name("told_at_once.py")
LEAKING = Path(__file__).with_name("leaking_rlvr.py")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    row = {"prompt": "a", "ground_truth": "1", "domain": "toy"}
    good, elsewhere = json.dumps(row), [json.dumps(row | {"prompt": p, "domain": "nowhere"}) for p in "abcdefgh"]
    (toy.path / "broken.jsonl").write_text(f'{good}\n{{"prompt": 3\n')
    (toy.path / "wrong.jsonl").write_text(f"{good}\n\n{json.dumps(row | {'prompt': 3})}\n")
    rows = [json.dumps(row | {"id": "x", "prompt": prompt}) for prompt in "ab"]
    (toy.path / "twice.jsonl").write_text("\n".join(rows))
    (toy.path / "elsewhere.jsonl").write_text("\n".join(elsewhere))
    (toy.path / "deep.jsonl").write_text(json.dumps(row)[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}")
    (toy.path / "empty").mkdir()
    for kind in ("mamba2", "jamba"):
        shutil.copytree(toy.model, toy.path / kind)
        (toy.path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    layers = json.loads((toy.model / "config.json").read_text()) | {"layer_types": ["linear_attention"] * 2}
    shutil.copytree(toy.model, toy.path / "linear")
    (toy.path / "linear" / "config.json").write_text(json.dumps(layers))
    return toy


def door(toy: Toy, *overrides: str, env: dict | None = None) -> tuple[int, list[str], float]:
    """Exit code, all lines printed, CPU seconds of `python -m spmd_rl.rlvr`."""
    command = [sys.executable, "-m", "spmd_rl.rlvr", *toy.settings(), f"run.dir={toy.path}/run", *overrides]
    return finish(command, {"PYTHONPATH": str(ROOT), **(env or {})})


def finish(command: list[str], env: dict, timeout: float = 120) -> tuple[int, list[str], float]:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, timeout=timeout,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), spent() - before


TOLD_AT_ONCE = [
    ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean rollout.temperature?"),
    ("steps=many", "steps: expected int, got 'many'"),
    ("rollout.filter=[1]", "rollout.filter: "),
    ("rollout.constraint.regex='('", "rollout.constraint.regex: missing )"),
    ("rollout.constraint.json_schema=/no/schema", "rollout.constraint.json_schema: /no/schema: No such file"),
    ("rollout.constraint.choice=[a] rollout.stop=[b]", "rollout.constraint.choice: not with rollout.stop, which "),
    ("rollout.constraint.choice=[a] teacher.model={path}/model", "rollout.constraint.choice: not with teacher.model"),
    ("rollout.constraint.choice=[a] rollout.thinking_budget=2", "rollout.constraint.choice: not with rollout.thinking"),
    (
        "rollout.constraint.choice=[a] rollout.target=tests.e2e.own.episodes:ask",
        "rollout.constraint.choice: not with rollout.target, whose turns",
    ),
    ("rollout.temperature=-1", "rollout.temperature: must be greater than 0, not -1.0"),
    ("algorithm=grop", "algorithm: unknown option 'grop'; did you mean algorithm=grpo? known: cispo, "),
    ("algorithm.advantage=grop", "algorithm.advantage: unknown name 'grop'; known: grpo"),
    ("algorithm.loss=ppo", "algorithm.loss: unknown name 'ppo'; known: ppo_clip"),
    ("algorithm.loss_agg=mean", "algorithm.loss_agg: unknown name 'mean'; known: token-mean, "),
    ("algorithm.kl_estimator=k9", "algorithm.kl_estimator: unknown name 'k9'; known: k1, "),
    ("policy.model=/no/such/dir", "policy.model: no directory /no/such/dir; "),
    ("policy.model={path}/empty", "policy.model: {path}/empty has no config.json; "),
    (
        "policy.model={path}/mamba2",
        "policy.model: mamba2 has layers whose state carries over from one sequence to",
    ),
    (
        "policy.model={path}/jamba",
        "policy.model: jamba has layers whose state carries over from one seq",
    ),
    (
        "policy.model={path}/linear",
        "policy.model: llama has linear_attention layers and cannot be trained here; these ",
    ),
    ("data.train={path}/none.jsonl", "data.train: no file {path}/none.jsonl; "),
    ("data.train={path}/broken.jsonl", "data.train: {path}/broken.jsonl:2: "),
    ("data.train={path}/wrong.jsonl", "data.train: {path}/wrong.jsonl:3: "),
    ("data.train={path}/twice.jsonl", "data.train: {path}/twice.jsonl:2: "),
    ("data.train={path}/elsewhere.jsonl", "no reward.nowhere.target is set"),
    ("reward.toy.target=no.such:Reward", "reward.toy.target: no.such:Reward cannot be imported: ModuleNotFoundError: "),
    ("reward.toy.target=tests.e2e.toy_reward:Missing", "reward.toy.target: tests.e2e.toy_reward:Missing cannot be imp"),
    (
        "reward.toy.args.slep=1",
        "reward.toy.target: tests.e2e.toy_reward:ParityReward cannot be built with reward.toy.a",
    ),
    ("run.name=../x", "run.name: must be a name and not a path, not '../x'; run.dir says where"),
    ("algorithm=[grpo,ppo]", "algorithm: must be one option, not [grpo,ppo]; known: cispo, "),
    ("reward.toy.args=[1]", "reward.toy.args: expected mapping, got [1]"),
    ("data.train={path}/deep.jsonl", "data.train: {path}/deep.jsonl:1: nested "),
    ("engine.tp=2", "engine.tp: not supported by engine=native; must be 1"),
    ("train.tp=3", "train.tp: 3 does not divide "),
    ("--multirun", "--multirun: not supported, "),
    # numbers that are bounded before they are counted out
    ("plan.ranks=100000000 --plan", "plan.ranks: must be at most 100000, not 100000000"),
    ("plan.ranks=0 --plan", "plan.ranks: must be at least 1, not 0"),
    ("reward.toy.cpus=0-99999999999", "reward.toy.cpus: there is no CPU 99999999999 "),
    ("reward.toy.cpus=8-3", "reward.toy.cpus: 8-3 is in reverse order; write 3-8"),
    # addresses
    # what rlvr does not have
    (
        "rollout.max_turns=3",
        "rollout.max_turns: unknown key; rlvr's answers have one turn, python -m spmd_rl.agentic",
    ),
    ("teacher.hint={{ansr}}", "teacher.hint: unknown field {{ansr}}; known: {{answer}}"),
    ("placement.patience=2", "placement.patience: unknown key; rlvr's answers have one turn, "),
    ("algorithm.step_reward_gamma=0.5", "algorithm.step_reward_gamma: unknown key; rlvr's answers have one turn, "),
    (
        "algorithm.name=gigpo",
        "algorithm.name: is only a label and sets nothing; to choose the recipe, set algorithm=gigpo",
    ),
    ("env.x.target=a:B", "env.x.target: unknown key; python -m spmd_rl.agentic has it"),
    ("warmup.steps=2", "warmup.steps: unknown key; python -m spmd_rl.agentic has it"),
    # templates
    ("data.format={{question}}{{nope}}", "data.format: unknown {{nope}}; known: {{question}}"),
    ("data.format={{question}}\\n{{Question}}", "data.format: unknown {{Question}}; known: {{question}}"),
    (
        "reward.toy.devices=cpu reward.toy.server=serve_{{port}}_of_{{gpu}}",
        "reward.toy.server: unknown {{gpu}}; known: {{model}}, {{port}}, {{num_devices}}",
    ),
    # several at once, and options
    (
        "foo.bar=1 rollout.temprature=1 trainer.val_before_train=1 learning_rate=1",
        "rollout.temprature: unknown key; did you mean rollout.temperature? | foo.bar: unknown key; --help lists all | "
        "trainer.val_before_train: unknown key; here it is eval.every, ",
    ),
    ("--dryrun", "--dryrun: unknown option; did you mean --dry-run?"),
    ("--steps 5", "--steps: unknown option; settings are key=value: steps=5"),
    ("--rollout.top-p=0.9", "--rollout.top-p: unknown option; settings are key=value: rollout.top_p=0.9"),
    ("--learning-rate 1", "--learning-rate: unknown option; settings are key=value: here it is policy.lr"),
    ("--cfg", "--cfg/-c: expected one argument"),
    ("run.name=a\x1b[2Jb", r"run.name: must be a name and not a path, not 'a\x1b[2Jb'"),
]


@pytest.fixture(scope="module")
def outcomes(toy: Toy) -> list[dict]:
    """What each of these leads to, of one process for all."""
    settings = toy.settings()
    lines = [
        [*settings, f"run.dir={toy.path}/told-{i}", *case[0].format(path=toy.path).split(" ")]
        for i, case in enumerate(TOLD_AT_ONCE)
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(TOLD)]
    done = subprocess.run(command, cwd=ROOT, env=env, input=json.dumps(lines), text=True, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(TOLD_AT_ONCE)), ids=[case[0][:60] for case in TOLD_AT_ONCE])
def test_one_clear_line_before_torch_is_loaded(toy: Toy, outcomes: list[dict], number: int) -> None:
    told, line = outcomes[number], TOLD_AT_ONCE[number][1]
    assert told["code"] == 2 and not told["torch"] and len(told["printed"]) == 1, "\n".join(told["printed"])
    (printed,) = told["printed"]
    assert printed.startswith(f"error: {line.format(path=toy.path)}")
    if "--plan" not in TOLD_AT_ONCE[number][0]:  # which writes nothing
        (written,) = (toy.path / f"told-{number}").rglob("error.txt")
        assert printed == "error: " + written.read_text().strip()


@pytest.mark.parametrize("door", ["distill", "evaluate"])
def test_other_doors_name_a_wrong_row_before_torch(toy: Toy, door: str) -> None:
    """Those over written rows: `test_supervised.py`."""
    wrong, about = f"{toy.path}/wrong.jsonl", "data.eval" if door == "evaluate" else "data.train"
    kept = ("policy.", "reward.") if door == "evaluate" else ("",)
    given = [one for one in toy.settings() if one.startswith(kept) and one != "policy.lr=1e-3"]
    more = [f"teacher.model={toy.model}"] if door == "distill" else []
    command = [sys.executable, "-c", NO_TORCH, f"spmd_rl.{door}", *given, f"{about}={wrong}", *more]
    _, lines, _ = finish([*command, f"run.dir={toy.path}/{door}"], {"PYTHONPATH": str(ROOT)})
    assert lines[-1] == "False" and lines[-2].startswith(f"error: {about}: {wrong}:3: "), lines


def test_a_mistake_ends_the_process_with_its_line(toy: Toy) -> None:
    code, printed, _ = door(toy, "steps=many")
    assert code == 2 and printed == ["error: steps: expected int, got 'many'"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_one_clear_line_from_within_the_run(toy: Toy, ranks: int) -> None:
    """What only the tokenizer can know, after the world has formed."""
    run = toy.start("rollout.max_prompt_tokens=4", ranks=ranks, name=f"within-{ranks}")
    assert run.wait() == 2
    printed = run.text().splitlines()
    assert printed[-1].startswith("error: rollout.max_prompt_tokens=4: all ")
    assert sum(line.startswith("error: ") for line in printed) == 1 and "Traceback" not in run.text()
    assert printed[-1] == "error: " + (run.run_dir / "error.txt").read_text().strip()


def test_no_rank_takes_the_cpu_in_the_place_of_a_device_that_torch_cannot_use(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    script = tmp_path / "elsewhere.py"
    script.write_text(
        "import pathlib, runpy\n"
        "from spmd_rl.distributed import device_files\n"
        f"device_files.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        'runpy.run_module("spmd_rl.rlvr", run_name="__main__")\n'
    )
    run = toy.start(script=script, name="no-device")
    assert run.wait() == 2
    (line,) = {line for line in run.text().splitlines() if line.startswith("error: ")}  # each rank finds it by itself
    assert "this machine has /dev/davinci0, but torch" in line and "ASCEND_RT_VISIBLE_DEVICES=" in line
    asked = toy.start("steps=1", script=script, name="asked", env={"ASCEND_RT_VISIBLE_DEVICES": ""})
    assert asked.wait() == 0 and "(cpu)" in asked.text()


@pytest.mark.parametrize(
    ("leaks", "ranks", "settings"),
    [
        ("state", 0, ()),
        ("state", 2, ()),
        ("statistics", 1, ("policy.dtype=float32",)),
        ("state", 2, ("train.pp=2", "policy.dtype=float32")),
    ],
)
def test_a_model_that_mixes_packed_sequences_ends_before_the_first_step(
    toy: Toy, leaks: str, ranks: int, settings: tuple[str, ...]
) -> None:
    name = "-".join([leaks, str(ranks), *settings]).replace("=", "-")
    run = toy.start(*settings, ranks=ranks, name=name, script=LEAKING, env={"LEAKS": leaks})
    assert run.wait() == 2, run.text()
    (line,) = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: policy.model: {toy.model} does not keep packed sequences apart: neighbours change ")
    assert "Traceback" not in run.text() and "step 0" not in run.text()
    assert line == "error: " + (run.run_dir / "error.txt").read_text().strip()


@pytest.mark.parametrize(
    ("override", "restarts"),
    [
        ("data.train={path}/broken.jsonl", 2),
        pytest.param("rollout.temperature=-1", 0, marks=pytest.mark.slow),
        # which one rank a node looks at
        pytest.param("reward.toy.target=no.such:Reward", 0, marks=pytest.mark.slow),
    ],
)
def test_torchrun_prints_the_line_once_and_does_not_try_again(toy: Toy, override: str, restarts: int) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    agent += ["--max-restarts", str(restarts), "-m", "spmd_rl.rlvr", *toy.settings(), f"run.dir={toy.path}/ranks"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code, printed, _ = finish([*agent, override.format(path=toy.path)], env)
    assert code == 1, "\n".join(printed)
    told = [line for line in printed if line.startswith("error: ")]
    assert told == ["error: " + (toy.path / "ranks" / "error.txt").read_text().strip()]
    reported = [text.partition(":")[2].strip() for text in printed if text.strip().startswith("traceback :")]
    if not restarts:  # an agent that forgoes its restarts ends without a report
        assert told[0] in reported and not any("To enable traceback" in text for text in reported)
        assert any(text.strip().startswith("exitcode  : 2 ") for text in printed)


def test_debug_runs_the_whole_loop_in_one_process_with_breakpoints(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(
        "import os, psutil\n"
        "from tests.e2e.toy_reward import ParityReward\n"
        "class Stopping(ParityReward):\n"
        "    def score(self, prompt, answer, info):\n"
        "        family = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]\n"
        "        with open(os.environ['PIDS'], 'a') as f: f.write(f'{family}\\n')\n"
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
    assert set((tmp_path / "pids").read_text().splitlines()) == {f"[{process.pid}]"}


def test_debug_on_two_ranks_is_refused(toy: Toy) -> None:
    code, printed, _ = door(toy, "debug=true", env={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})
    assert code == 2 and printed[-1].startswith("error: debug: works in one process, not with 2 ranks")


def test_a_reward_in_one_file_of_the_users_own(toy: Toy, tmp_path: Path) -> None:
    """The example of docs/EXTENDING.md, as it stands there."""
    source = (ROOT / "docs/EXTENDING.md").read_text().split("# my_reward.py\n")[1].split("```")[0]
    (tmp_path / "my_reward.py").write_text(source)
    settings = ("steps=1", "reward.toy.target=my_reward:ShortAnswer", "rollout.filter.zero_variance=false")
    run = toy.run(*settings, ranks=0, name="own_reward", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert len(run.metrics()) == 2
