"""The cluster templates, against stand-ins for Slurm's commands that say how they were called."""

import os
import subprocess
from pathlib import Path

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch" / "slurm" / "rlvr.sbatch"


def submit(place: Path, *arguments: str, nodes: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, where `scontrol` is `nodes` and `srun` prints what it would run, word by word."""
    for name, script in {"scontrol": nodes, "srun": 'printf "%s\\n" "$@"'}.items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **job, **env, "PATH": f"{place}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(place)}
    return subprocess.run(["bash", SBATCH, *arguments], env=env, capture_output=True, text=True)


def submitted(place: Path, *arguments: str, nodes: str = "echo node7; echo node8", **env: str) -> list[str]:
    """What `srun` would run, word by word."""
    done = submit(place, *arguments, nodes=nodes, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_agent_a_node_meets_at_the_first(tmp_path: Path) -> None:
    words = submitted(tmp_path, "steps=3", "data.format='{question} please'", RANKS="4")
    line = " ".join(words)
    assert "--ntasks-per-node=1" in words and ".venv/bin/torchrun" in words
    assert "--nnodes 2 --nproc-per-node 4 --max-restarts 3" in line
    assert "--rdzv-id 41 --rdzv-backend c10d --rdzv-endpoint node7:20041" in line
    assert words[-4:] == ["-m", "spmd_rl.rlvr", "steps=3", "data.format='{question} please'"]


def test_nodes_without_ranks_attach_to_those_with(tmp_path: Path) -> None:
    allow = "math=rewards.math_verify:MathReward code=rewards.code:CodeReward"
    env = {"SIDECAR_KEYS": "/k", "SIDECAR_ALLOW": allow, "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    words = submitted(tmp_path, "steps=3", **env)
    line = " ".join(words)
    allowed = " ".join(f"--allow {one}" for one in allow.split())
    for name in ("node7", "node8"):  # the stand-in names both lists alike
        attached = f"-m spmd_rl.sidecar --connect tcp://{name}:20042 --keys /k/cpu {allowed}"
        assert f"--nodelist={name} .venv/bin/python {attached}" in line
    assert "steps=3 sidecar.bind=tcp://*:20042 sidecar.keys=/k" in line
    settings = [word for word in words if word.startswith("sidecar.")]
    assert load("rlvr", RlvrConfig, settings).sidecar.bind == "tcp://*:20042"


def test_a_list_of_nodes_is_heard_out(tmp_path: Path) -> None:
    """Who takes the first name and hangs up ends `scontrol`, and with it the job: on two nodes now and then."""
    line = " ".join(submitted(tmp_path, nodes="echo node7; sleep 0.2; echo node8"))
    assert "--rdzv-endpoint node7:20041" in line


def test_a_list_of_nodes_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    for nodes in ("exit 1", 'test "$3" = "node[7-8]" && echo node7'):
        env = {"SIDECAR_KEYS": "/k", "SIDECAR_ALLOW": "math=m:M", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
        done = submit(tmp_path, nodes=nodes, **env)
        assert done.returncode == 1 and not done.stdout


def test_sidecars_of_other_nodes_must_be_told_what_they_may_import(tmp_path: Path) -> None:
    env = {"SIDECAR_KEYS": "/k", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    done = submit(tmp_path, nodes="echo node7", **env)
    assert done.returncode == 1 and "SIDECAR_ALLOW" in done.stderr and not done.stdout


def test_a_rank_for_each_gpu_by_default(tmp_path: Path) -> None:
    assert "--nproc-per-node gpu" in " ".join(submitted(tmp_path))


def test_slurm_reads_its_own_lines() -> None:
    """They count only above the first command."""
    lines = SBATCH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert "#SBATCH --ntasks-per-node=1" in lines
