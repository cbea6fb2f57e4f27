"""The cluster templates, against stand-ins for Slurm's commands that say how they were called, and with what limits."""

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch" / "slurm" / "run.sbatch"


SRUN = """printf "%s\\n" "$@"
case "$*" in *spmd_rl.sidecar*) GIVEN=$GIVEN.sidecar ;; esac
{ env; echo "l=$(ulimit -Sl) n=$(ulimit -Sn) hard=$(ulimit -Hn)"; } >"$GIVEN"
"""


def submit(place: Path, *arguments: str, nodes: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, where `scontrol` is `nodes` and `srun` prints what it would run, word by word.

    What a step would have is in the file `given`: variables and limits.
    """
    for name, script in {"scontrol": nodes, "srun": SRUN}.items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"GIVEN": str(place / "given"), "SLURM_SUBMIT_DIR": str(place)}
    here = {name: value for name, value in os.environ.items() if not name.startswith(("SRUN_", "SLURM_"))}
    env = {**here, **job, **env, "PATH": f"{place}:{os.environ['PATH']}"}
    return subprocess.run(["bash", SBATCH, *arguments], env=env, capture_output=True, text=True)


def submitted(place: Path, *arguments: str, nodes: str = "echo node7; echo node8", **env: str) -> list[str]:
    """What `srun` would run, word by word."""
    done = submit(place, *arguments, nodes=nodes, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_agent_a_node_meets_at_the_first(tmp_path: Path) -> None:
    words = submitted(tmp_path, "spmd_rl.rlvr", "steps=3", "data.format='{question} please'", RANKS="4")
    line = " ".join(words)
    assert "--ntasks-per-node=1" in words and ".venv/bin/torchrun" in words
    assert "--nnodes 2 --nproc-per-node 4 --max-restarts 3" in line
    assert "--rdzv-id 41 --rdzv-backend c10d --rdzv-endpoint node7:20041" in line
    assert words[-4:] == ["-m", "spmd_rl.rlvr", "steps=3", "data.format='{question} please'"]


def test_nodes_without_ranks_are_hosts_that_the_run_lists(tmp_path: Path) -> None:
    env = {"SIDECAR_KEYS": "/k", "SIDECAR": "reward.math.workers=9", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    words = submitted(tmp_path, "spmd_rl.rlvr", "steps=3", **env)
    line = " ".join(words)
    for name in ("node7", "node8"):  # the stand-in names both lists alike
        host = "-m spmd_rl.sidecar --bind tcp://*:20042 --keys /k spmd_rl.rlvr steps=3 reward.math.workers=9"
        assert f"--nodelist={name} .venv/bin/python {host}" in line
    settings = [word for word in words if word.startswith("sidecar.")]
    sidecar = load("rlvr", RlvrConfig, settings).sidecar
    assert sidecar.hosts == ["tcp://node7:20042", "tcp://node8:20042"] and sidecar.keys == "/k"


def test_a_list_of_nodes_is_heard_out(tmp_path: Path) -> None:
    """Who takes the first name and hangs up ends `scontrol`, and with it the job: on two nodes now and then."""
    line = " ".join(submitted(tmp_path, "spmd_rl.rlvr", nodes="echo node7; sleep 0.2; echo node8"))
    assert "--rdzv-endpoint node7:20041" in line


def test_a_list_of_nodes_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    for nodes in ("exit 1", 'test "$3" = "node[7-8]" && echo node7'):
        env = {"SIDECAR_KEYS": "/k", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
        done = submit(tmp_path, "spmd_rl.rlvr", nodes=nodes, **env)
        assert done.returncode == 1 and not done.stdout


def test_a_rank_for_each_gpu_by_default(tmp_path: Path) -> None:
    assert "--nproc-per-node gpu" in " ".join(submitted(tmp_path, "spmd_rl.rlvr"))


def test_slurm_reads_its_own_lines() -> None:
    """They count only above the first command."""
    lines = SBATCH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert "#SBATCH --ntasks-per-node=1" in lines
    for line in ("--exclusive", "--mem=0", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {line}" in lines


@pytest.mark.parametrize("module", ["spmd_rl.agentic", "spmd_rl.rlvr", "spmd_rl"])
def test_the_first_word_is_the_module(tmp_path: Path, module: str) -> None:
    assert submitted(tmp_path, module, "a=b c")[-3:] == ["-m", module, "a=b c"]


@pytest.mark.parametrize("words", [[], ["policy.model=x"], ["+experiment=demo"], ["--plan"], ["spmd_rl.rlvr x=1"]])
def test_without_a_module_nothing_starts(tmp_path: Path, words: list[str]) -> None:
    done = submit(tmp_path, *words, nodes="echo node7")
    assert done.returncode == 2 and not done.stdout and "is no module; say run.sbatch spmd_rl.rlvr" in done.stderr


def given(place: Path, step: str = "given") -> list[str]:
    """Variables and, in the last line, limits of a step."""
    return (place / step).read_text().splitlines()


@pytest.mark.parametrize("cores", [{"SLURM_CPUS_PER_TASK": "96"}, {}])
def test_all_cores_of_the_job_reach_the_ranks_and_those_of_a_sidecar_are_its_own(
    tmp_path: Path, cores: dict[str, str]
) -> None:
    env = {"SIDECAR_KEYS": "/k", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu1"}
    words = submitted(tmp_path, "spmd_rl.rlvr", nodes="echo node7", **env, **cores)
    assert words.count("--cpu-bind=none") == 2
    asked = [[line for line in given(tmp_path, step) if "SRUN_CPUS" in line] for step in ("given", "given.sidecar")]
    assert asked == [["SRUN_CPUS_PER_TASK=96"] if cores else [], []]


def test_open_files_and_locked_memory_are_as_many_as_may_be(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        done = submit(tmp_path, "spmd_rl.rlvr", nodes="echo node7")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = dict(word.split("=") for word in given(tmp_path)[-1].split())
    assert limits["n"] == limits["hard"]
    assert (limits["l"] == "unlimited") is ("locked memory is limited" not in done.stderr)


def test_a_limit_on_locked_memory_costs_a_line_and_not_the_job(tmp_path: Path) -> None:
    lower = "builtin ulimit -Sl 64; builtin ulimit -Hl 128"
    refuses = f'() {{ if [ "$*" = "-l unlimited" ]; then {lower}; return 1; fi; builtin ulimit "$@"; }}'
    done = submit(tmp_path, "spmd_rl.rlvr", nodes="echo node7", **{"BASH_FUNC_ulimit%%": refuses})
    assert done.returncode == 0 and given(tmp_path)[-1].startswith("l=128 ")
    assert done.stderr.startswith("locked memory is limited to 128 KiB: InfiniBand may fail")


def test_what_a_site_adds_to_srun_comes_last_and_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.sif").touch()
    words = submitted(
        tmp_path, "spmd_rl.rlvr", SRUN_ARGS="--container-image=x.sqsh  apptainer exec *.sif", VENV="/opt/v"
    )
    start = words.index("/opt/v/bin/torchrun")
    assert words[start - 4 : start] == ["--container-image=x.sqsh", "apptainer", "exec", "*.sif"]


def test_a_log_for_each_node_and_start(tmp_path: Path) -> None:
    words = submitted(tmp_path, "spmd_rl.rlvr", LOGS=str(tmp_path / "logs"), SLURM_RESTART_COUNT="2")
    assert f"--output={tmp_path}/logs/%x-%j-2-%N.log" in words and (tmp_path / "logs").is_dir()
    assert not any(word.startswith("--output") for word in submitted(tmp_path, "spmd_rl.rlvr"))


def test_the_script_is_clean() -> None:
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
