"""The boundary of a rank, through a tiny door in a process of its own: what is said, what is written, exit codes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from spmd_rl.config.main import record
from tests.fake_hub import NO_TENSORS
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
DOOR = '''"""A door that only fails."""
import errno, os, sys
from spmd_rl.config import RlvrConfig, main
from spmd_rl.base.errors import RunFailed, UserError

def run(cfg):
    how = os.environ.get("HOW", "well")
    if os.environ.get("TORCH"): sys.modules["torch"] = sys
    if how == "user": raise UserError("data.train: rows.jsonl:3:\\n  not JSON")
    if how == "failed": raise RunFailed("the error budget is spent")
    if how == "bug": assert 1 == 2, "ours"
    if how == "interrupt": raise KeyboardInterrupt
    if how == "disk":
        try: raise OSError(errno.ENOSPC, "No space left on device", "/data/x")
        except OSError as error: raise RuntimeError("could not save") from error
    if how == "exit": sys.exit(7)
    print("ran", cfg.steps)

if __name__ == "__main__":
    main("rlvr", RlvrConfig, run)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("door")
    (place / "door.py").write_text(DOOR)
    (place / "judge.py").write_text(
        "class Judge:\n    def __init__(self, extract): ...\n    def score(self, prompt, answer, info): ...\n"
    )
    (place / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (place / "model" / name).write_text('{"model_type": "llama"}')
    (place / "model" / "model.safetensors").write_bytes(NO_TENSORS)
    (place / "work").mkdir()
    return place


def start(place: Path, *arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(place / "door.py"), *arguments],
        cwd=place / "work",
        env={**os.environ, "PYTHONPATH": f"{place}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def good(place: Path, run: str) -> list[str]:
    return [
        "data=one_digit_sums",
        f"policy.model={place}/model",
        "reward.reasoning_gym.target=judge:Judge",
        f"run.dir={place}/{run}",
    ]


def test_a_good_end(place):
    code, out, err = finish(start(place, *good(place, "well"), "steps=3"))
    assert (code, out, err) == (0, "ran 3\n", "")
    assert not (place / "well").exists()


@pytest.mark.parametrize("torch", ["", "1"])
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("user", 2, "data.train: rows.jsonl:3: not JSON"),
        ("failed", 1, "the error budget is spent"),
        ("disk", 2, "disk full: /data/x"),
    ],
)
def test_one_line_last_of_all_and_in_error_txt(place, how, code, line, torch):
    run = f"{how}{torch}"
    told = finish(start(place, *good(place, run), HOW=how, TORCH=torch))
    assert told == (code, "", f"error: {line}\n")
    assert os.listdir(place / run) == ["error.txt"]
    assert (place / run / "error.txt").read_text() == f"{line}\n"


def test_our_own_mistake_keeps_its_traceback(place):
    code, _, err = finish(start(place, *good(place, "bug"), HOW="bug"))
    assert code == 1 and "Traceback" in err and err.endswith("AssertionError: ours\n")
    assert (place / "bug" / "error.txt").read_text() == "AssertionError: ours\n"


def test_interrupt_and_exit(place):
    assert finish(start(place, *good(place, "int"), HOW="interrupt")) == (130, "", "interrupted\n")
    assert finish(start(place, *good(place, "exit"), HOW="exit"))[0] == 7


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["steps=many"], "steps: expected int, got 'many'"),
        (["reward.reasoning_gym.target=judge:Nobody"], "reward.reasoning_gym.target: judge:Nobody cannot be imported"),
        (["--cfg", "all"], "--cfg/-c: invalid choice: 'all'"),
        (["--colour"], "--colour: unknown option; settings are key=value: --help lists all"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(place, arguments, line):
    """One of each kind; `tests/e2e/test_mistakes.py` has the others."""
    run = f"mistake-{arguments[0].strip('-').split('=')[0]}"
    code, out, err = finish(start(place, *good(place, run), *arguments))
    assert code == 2 and out == ""
    assert err.startswith(f"error: {line}") and err.count("\n") == 1
    assert err == "error: " + (place / run / "error.txt").read_text()


def test_a_start_that_fails_makes_no_folder_that_was_not_named(place):
    arguments = [word for word in good(place, "") if not word.startswith("run.dir")]
    before = sorted(os.listdir(place))
    for mistake in ("steps=many", "algorithm=grop", "data.holdout=0.3"):
        assert finish(start(place, *arguments, mistake, HOW="user"))[0] == 2
    assert sorted(os.listdir(place)) == before


def test_a_stale_error_goes_when_a_run_starts(place):
    (place / "again").mkdir()
    stale = place / "again" / "error.txt"
    stale.write_text("data.train: rows.jsonl:3: not JSON\n")
    os.utime(stale, (1, 1))
    assert finish(start(place, *good(place, "again"), HOW="user"))[2] == "error: data.train: rows.jsonl:3: not JSON\n"
    os.utime(stale, (1, 1))
    assert finish(start(place, *good(place, "again")))[0] == 0
    assert not stale.exists()


def test_the_same_line_of_two_ranks_is_said_once(place):
    both = {"HOW": "user", "WORLD_SIZE": "2"}
    ranks = [start(place, *good(place, "two"), RANK=n, LOCAL_RANK=n, **both) for n in ("0", "1")]
    ends = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in ends] == [2, 2]
    # Two ranks that do not start together may say it twice, never not at all.
    assert [err for _, _, err in ends if err]
    assert os.listdir(place / "two") == ["error.txt"]


@pytest.mark.parametrize(
    ("how", "words"), [("user", "error: data.train: rows.jsonl:3: not JSON"), ("bug", "Traceback")]
)
def test_torchrun_is_told_why(place, tmp_path, how, words):
    reply = tmp_path / "error.json"
    finish(start(place, *good(place, f"told-{how}"), HOW=how, TORCHELASTIC_ERROR_FILE=str(reply)))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(reply))
    assert words in ChildFailedError("rlvr", {0: failure}).format_msg()


def test_who_comes_first_speaks(tmp_path):
    assert record(tmp_path, "this")
    assert not record(tmp_path, "this")
    assert record(tmp_path, "that")
    assert (tmp_path / "error.txt").read_text() == "this\n"
    os.utime(tmp_path / "error.txt", (1, 1))
    assert record(tmp_path, "that")
    assert (tmp_path / "error.txt").read_text() == "that\n"
    assert os.listdir(tmp_path) == ["error.txt"]


def test_a_rank_waits_for_local_rank_0_to_say_it(place):
    """Before the process group forms, torchrun ends the others as soon as local rank 0 is gone."""
    began = time.time()
    process = start(place, *good(place, "late"), "steps=many", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    time.sleep(2)
    assert process.poll() is None
    process.terminate()
    code, out, err = finish(process)
    assert code == -15 and (out, err) == ("", "")
    assert time.time() - began < patient(9)


def test_warnings_come_from_rank_0_alone(place):
    line = "warning: algorithm.kl_estimator: has no effect while algorithm.kl_coef is 0\n"
    idle = "algorithm.kl_estimator=k1"
    assert finish(start(place, *good(place, "w"), idle))[2] == line
    assert finish(start(place, *good(place, "w"), idle, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"))[2] == ""


def test_cfg_and_help_print_and_write_nothing(place):
    code, out, err = finish(start(place, "--cfg", "job", "--resolve", "steps=3", "policy.model=/no/such"))
    assert (code, err) == (0, "") and "steps: 3\n" in out and "model: /no/such\n" in out
    assert finish(start(place, "--cfg", "job", "steps=many", "run.dir=here"))[0] == 2


def test_a_line_without_steps_is_one_of_the_evaluation(place: Path) -> None:
    code, out, err = finish(start(place, "--cfg", "job", "steps=0", "policy.model=/no/such", "eval.answers=3"))
    assert code == 0, err
    assert "steps:" not in out
    assert "- pass@3" in out
    code, _, err = finish(start(place, "--cfg", "job", "steps=0", "algorithm.kl_coef=1"))
    assert code == 2
    assert "algorithm.kl_coef" in err
    code, out, err = finish(start(place, "steps=3", "+experiment=two_digit_sums", "--help"))
    assert (code, err) == (0, "") and "\n  steps=3  (int)\n" in out and "\n  policy.lr=3.0e-05  (float)\n" in out
    for words in (
        "A door that only fails.",
        "usage: ",
        "two_digit_sums",
        "rollout.temperature=0.6",
        "Token limit of an",
    ):
        assert words in out
    assert finish(start(place, "--help", RANK="1"))[:2] == (0, "")
    assert os.listdir(place / "work") == []


def test_help_and_cfg_need_no_torch(place):
    code = (
        "import sys, door\nfrom spmd_rl.config import RlvrConfig, main\n"
        "main('rlvr', RlvrConfig, door.run, ['--help'])\nmain('rlvr', RlvrConfig, door.run, ['--cfg', 'job'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{place}:{ROOT}"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def test_another_setting_in_a_used_directory_is_refused(place):
    code = (
        "import sys\nfrom spmd_rl.config.run_identity import write_config\nfrom spmd_rl.config.load import load\n"
        "from spmd_rl.config.schema import RlvrConfig\n"
        "cfg = load('rlvr', RlvrConfig, sys.argv[1:]); write_config(cfg, cfg.run.dir, 'rlvr')"
    )
    subprocess.run([sys.executable, "-c", code, *good(place, "used")], check=True)
    assert finish(start(place, *good(place, "used"), "rollout.temperature=0.5"))[2] == ""  # it made no step
    (place / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    code, _, err = finish(start(place, *good(place, "used"), "steps=99"))
    assert (code, err) == (0, "notice: steps: 100 before, 99 from here on\n")
    code, _, err = finish(start(place, *good(place, "used"), "rollout.temperature=0.5"))
    assert code == 2 and err.startswith(f"error: rollout.temperature: {place}/used was started with 1.0, not 0.5")
