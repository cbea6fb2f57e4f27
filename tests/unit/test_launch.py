"""The cluster templates, against stand-ins for Slurm's commands and torchrun that say how they were called."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch" / "slurm" / "run.sbatch"


SRUN = """case "$*" in *doctor*) echo "$*" >>"$GIVEN.doctor"; exit "$(cat "$GIVEN.ill" 2>/dev/null || echo 0)" ;; esac
printf "%s\\n" "$@"
case "$*" in *spmd_rl.sidecar*) GIVEN=$GIVEN.sidecar ;; esac
{ env; echo "l=$(ulimit -Sl) n=$(ulimit -Sn) hard=$(ulimit -Hn)"; } >"$GIVEN"
"""


def submit(
    place: Path, *arguments: str, nodes: str = "echo node7; echo node8", then: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """The script, where `scontrol` is `nodes` and `srun` prints what it would run, word by word, and does `then`.

    What a step would have is in the file `given`: variables and limits. The doctor is asked where `DOCTOR` says so.
    """
    requeue = '[ "$1" != requeue ] || { echo "queued again: $2"; exit; }'
    for name, script in {"scontrol": f"{requeue}\n{nodes}", "srun": f"{SRUN}\n{then}", "sinfo": ""}.items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"GIVEN": str(place / "given"), "SLURM_SUBMIT_DIR": str(place), "DOCTOR": "", "VENV": ".venv"}
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
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=node7,node8 .venv/bin/python -m spmd_rl node" in line
    assert "node --nodes 2 --rendezvous node7:20041 --id 41-0-0 --ranks 4 --restarts 3 spmd_rl.rlvr" in line
    assert words[-3:] == ["spmd_rl.rlvr", "steps=3", "data.format='{question} please'"]


def test_nodes_without_ranks_are_hosts_that_the_run_lists(tmp_path: Path) -> None:
    env = {"SIDECAR_KEYS": "/k", "SIDECAR": "reward.math.workers=9", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    words = submitted(tmp_path, "spmd_rl.rlvr", "steps=3", **env)
    line = " ".join(words)
    for name in ("node7", "node8"):  # the stand-in names both lists alike
        host = "-m spmd_rl.sidecar --bind tcp://*:20042 --keys /k spmd_rl.rlvr steps=3 reward.math.workers=9"
        assert f"""--nodelist={name} sh -c trap "" TERM USR1; "$@"; exit host .venv/bin/python {host}""" in line
    settings = [word for word in words if word.startswith("sidecar.")]
    sidecar = load("rlvr", RlvrConfig, settings).sidecar
    assert sidecar.hosts == ["tcp://node7:20042", "tcp://node8:20042"] and sidecar.keys == "/k"


def test_a_list_of_nodes_is_heard_out(tmp_path: Path) -> None:
    """Who takes the first name and hangs up ends `scontrol`, and with it the job: on two nodes now and then."""
    line = " ".join(submitted(tmp_path, "spmd_rl.rlvr", nodes="echo node7; sleep 0.2; echo node8"))
    assert "--rendezvous node7:20041" in line


def test_a_list_of_nodes_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    for nodes in ("exit 1", 'test "$3" = "node[7-8]" && echo node7'):
        env = {"SIDECAR_KEYS": "/k", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
        done = submit(tmp_path, "spmd_rl.rlvr", nodes=nodes, **env)
        assert done.returncode == 1 and not done.stdout


def test_a_rank_for_each_gpu_by_default(tmp_path: Path) -> None:
    assert "--ranks gpu" in " ".join(submitted(tmp_path, "spmd_rl.rlvr"))
    # A node that has lost one shall fail, not take part with fewer.
    assert "--ranks 8" in " ".join(submitted(tmp_path, "spmd_rl.rlvr", SLURM_GPUS_ON_NODE="8"))


def test_slurm_reads_its_own_lines() -> None:
    """They count only above the first command."""
    lines = SBATCH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert "#SBATCH --ntasks-per-node=1" in lines
    for line in ("--exclusive", "--mem=0", "--requeue", "--open-mode=append", "--signal=USR1@300"):
        assert f"#SBATCH {line}" in lines


@pytest.mark.parametrize("module", ["spmd_rl.agentic", "spmd_rl.rlvr", "spmd_rl"])
def test_the_first_word_is_the_module(tmp_path: Path, module: str) -> None:
    assert submitted(tmp_path, module, "a=b c")[-2:] == [module, "a=b c"]


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


@pytest.mark.parametrize(("code", "again"), [(138, True), (143, True), (130, False), (1, False), (0, False)])
def test_a_run_that_saved_at_a_signal_is_queued_again(tmp_path: Path, code: int, again: bool) -> None:
    """Not after SIGINT, by which a user saves and ends a job."""
    done = submit(tmp_path, "spmd_rl.rlvr", then=f"exit {code}")
    assert done.returncode == code and ("queued again: 41" in done.stdout.splitlines()) is again


def test_the_doctor_looks_at_each_node_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "given.ill").write_text("1")
    done = submit(tmp_path, "spmd_rl.rlvr", DOCTOR="open files,devices", RANKS="8")
    assert done.returncode == 1 and not done.stdout
    asked = sorted((tmp_path / "given.doctor").read_text().splitlines())
    checked = "node --ranks 8 --restarts 0 spmd_rl doctor --only open files,devices"
    assert [f"--nodelist={name} .venv/bin/python -m spmd_rl {checked}" for name in ("node7", "node8")] == [
        line[line.index("--nodelist") :] for line in asked
    ]
    assert done.stderr.endswith("error: run.sbatch: the run needs 2 nodes, and 0 of 2 pass the doctor\n")


def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """The first of three fails the doctor after the first start: the run goes on without it."""
    ill = 'case "$*" in *"nodelist=node6 "*doctor*) [ ! -e "$GIVEN" ] || exit 1 ;; esac'
    srun = f'{ill}\ncase "$*" in *doctor*) exit 0 ;; *41-0-0*) touch "$GIVEN"; exit 137 ;; esac'
    (tmp_path / "bin").mkdir()
    nodes = "echo node6; echo node7; echo node8"
    with_srun = f'#!/bin/sh\n{srun}\nprintf "%s\\n" "$@"\n'
    (tmp_path / "bin" / "srun").write_text(with_srun)
    (tmp_path / "bin" / "srun").chmod(0o755)
    env = {"DOCTOR": "devices", "SPARE": "1", "BASH_ENV": str(tmp_path / "path")}
    (tmp_path / "path").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    words = submitted(tmp_path, "spmd_rl.rlvr", nodes=nodes, **env)
    assert "--nodelist=node7,node8" in words and "41-0-1" in words and "node7:20041" in words
    (tmp_path / "given").unlink()
    (tmp_path / "bin" / "srun").write_text(with_srun.replace("exit 1 ;;", "exit 0 ;;", 1))
    assert submit(tmp_path, "spmd_rl.rlvr", nodes=nodes, **env).returncode == 137  # all are well: the run is at fault


TORCHRUN = """
import json, os, resource, signal, sys, time
limits = {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK")}
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print(json.dumps([sys.argv[1:], dict(os.environ), limits]), flush=True)
until = time.time() + float(os.environ.get("SECONDS", "0"))
while time.time() < until and not heard:
    time.sleep(0.01)
time.sleep(0.5 * len(heard))
sys.exit(len(heard) or int(os.environ.get("CODE", "0")))
"""


def node(place: Path, *words: str, **env: str) -> subprocess.Popen:
    """`python -m spmd_rl node` above a stand-in for torchrun."""
    for folder in (package := place / "torch", package / "distributed"):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (package / "distributed" / "run.py").write_text(TORCHRUN)
    env = os.environ | {"PYTHONPATH": f"{place}:{ROOT}"} | env
    env.pop("GLOO_SOCKET_IFNAME", None)  # an engine that ran before in this process has set it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "spmd_rl", "node", *words], env=env, cwd=place, **pipes)


def started(place: Path, *words: str, **env: str) -> list:
    """Torchrun's words, variables and limits."""
    out, err = (process := node(place, *words, **env)).communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def test_torchrun_meets_the_other_nodes(tmp_path: Path) -> None:
    where = ["--nodes", "2", "--rendezvous", "localhost:7", "--id", "41-0-0"]
    words, env, _ = started(
        tmp_path, *where, "--ranks", "4", "spmd_rl.rlvr", "steps=3", "--plan", TRITON_CACHE_DIR="/x"
    )
    many = "--nnodes 2 --nproc-per-node 4 --max-restarts 3"
    meet = "--rdzv-backend c10d --rdzv-endpoint localhost:7 --rdzv-id 41-0-0"
    assert " ".join(words) == f"{many} {meet} -m spmd_rl.rlvr steps=3 --plan"
    assert env["TRITON_CACHE_DIR"] == "/x" and "41-0-0" in env["VLLM_CACHE_ROOT"]
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 3600
    assert "GLOO_SOCKET_IFNAME" not in env  # the other nodes cannot be reached by this machine's own interface


def test_one_machine_alone(tmp_path: Path) -> None:
    words = started(tmp_path, "--numa", "node", "spmd_rl", "doctor")[0]
    many = "--nnodes 1 --nproc-per-node gpu --max-restarts 3"
    assert " ".join(words) == f"{many} --standalone --numa-binding node -m spmd_rl doctor"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_torchrun_has_one_sigterm_and_the_exit_code_names_the_signal(tmp_path: Path, signum: signal.Signals) -> None:
    process = node(tmp_path, "spmd_rl.rlvr", SECONDS="60")
    process.stdout.readline()
    process.send_signal(signum)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signum
    process.communicate()


def test_a_rank_that_stopped_at_a_signal_of_its_own_names_it_to_the_launcher(tmp_path: Path) -> None:
    process = node(tmp_path, "spmd_rl.rlvr", SECONDS="60")
    env = json.loads(process.stdout.readline())[1]
    assert env["SPMD_RL_NODE"] == str(process.pid)
    leave = "from spmd_rl.config.main import Exit; Exit(None).leave(138, '')"
    assert subprocess.run([sys.executable, "-c", leave], env=env, cwd=ROOT).returncode == 138
    assert process.wait(60) == 138
    process.communicate()


def test_the_exit_code_is_torchruns(tmp_path: Path) -> None:
    process = node(tmp_path, "spmd_rl.rlvr", CODE="3")
    process.communicate()
    assert process.returncode == 3


@pytest.mark.parametrize("words", [["steps=3"], ["--nodes", "2", "spmd_rl.rlvr"], ["--nodes", "0", "spmd_rl.rlvr"], []])
def test_a_mistake_starts_nothing(tmp_path: Path, words: list[str]) -> None:
    out, err = (process := node(tmp_path, *words)).communicate()
    assert process.returncode == 2 and not out and err.startswith("error: ")


def test_open_files_and_locked_memory_are_as_many_as_may_be(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        out, err = node(tmp_path, "spmd_rl.rlvr").communicate()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = json.loads(out)[2]
    assert limits["RLIMIT_NOFILE"] == [hard, hard]
    assert (limits["RLIMIT_MEMLOCK"][0] == resource.RLIM_INFINITY) is ("locked memory is limited" not in err)
    assert limits["RLIMIT_MEMLOCK"][0] == limits["RLIMIT_MEMLOCK"][1]


def test_what_a_site_adds_to_srun_comes_last_and_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.sif").touch()
    words = submitted(
        tmp_path, "spmd_rl.rlvr", SRUN_ARGS="--container-image=x.sqsh  apptainer exec *.sif", VENV="/opt/v"
    )
    start = words.index("/opt/v/bin/python")
    assert words[start - 4 : start] == ["--container-image=x.sqsh", "apptainer", "exec", "*.sif"]


def test_a_log_for_each_node_and_start(tmp_path: Path) -> None:
    words = submitted(tmp_path, "spmd_rl.rlvr", LOGS=str(tmp_path / "logs"), SLURM_RESTART_COUNT="2")
    assert f"--output={tmp_path}/logs/%x-%j-2-%N.log" in words and (tmp_path / "logs").is_dir()
    assert not any(word.startswith("--output") for word in submitted(tmp_path, "spmd_rl.rlvr"))


def test_kubernetes_takes_the_job() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes" / "job.yaml").read_text())
    spec, name = job["spec"], job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    assert f"--nodes={spec['completions']}" == f"--nodes={spec['parallelism']}" == container["args"][0]
    assert container["args"][1] == f"--rendezvous={name}-0.{service['metadata']['name']}:29500"
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    settings = container["args"][container["args"].index("spmd_rl.rlvr") + 1 :]
    assert load("rlvr", RlvrConfig, settings).checkpoint.every == 10
    schemas = pytest.importorskip("kubernetes_validate")
    for document in (service, job):
        schemas.validate(document, "1.31", strict=True)


def test_the_image_has_the_tests_versions_and_all_that_a_wheel_needs() -> None:
    lines = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    parsed = [line.split() for line in lines if line and not line.startswith("#")]
    assert {words[0] for words in parsed} <= {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
    copied = [word for words in parsed if words[0] == "COPY" for word in words[1:-1]]
    assert all((ROOT / word).exists() for word in copied)
    assert {"pyproject.toml", "setup.py", "spmd_rl", "configs", "envs", "launch", "rewards"} <= set(copied)
    (torch,) = [word for words in parsed for word in words if word.startswith("torch==")]
    assert torch in (ROOT / "launch" / "constraints-cpu.txt").read_text().splitlines()
    assert f" {torch}\n" in (ROOT / "Makefile").read_text()


def test_the_script_is_clean() -> None:
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
