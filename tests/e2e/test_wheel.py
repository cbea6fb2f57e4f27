"""The wheel holds all that a run needs, at a place of its own: it trains where no clone is in sight and where a user
has folders or files named `rewards`, `envs`, `configs` and `launch`; so does an editable install."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import ROOT, Toy
from tests.patience import patient

BUNDLED = ("configs", "rewards", "envs", "launch")
REWARD = """
class Parity:
    def score(self, prompt, answer, info):
        from spmd_rl.types import Verdict
        return Verdict("ok", float(sum(map(ord, answer)) % 2))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the clone, where no `build/` of an earlier day lies about."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    for name in ("spmd_rl", *BUNDLED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    pip("wheel", "--no-build-isolation", "--wheel-dir", source.parent, source)
    return next(source.parent.glob("spmd_rl-*.whl"))


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory) -> Path:
    """A directory with an environment in `venv/`, where the wheel is installed, and nothing of the clone."""
    outside = tmp_path_factory.mktemp("outside")
    install(outside / "venv", wheel)
    return outside


@pytest.fixture(scope="module")
def installed(request, tmp_path_factory) -> Path:
    """An environment with the wheel, or with an editable install."""
    if request.param == "wheel":
        return request.getfixturevalue("outside") / "venv"
    venv = tmp_path_factory.mktemp("editable") / "venv"
    install(venv, "--no-build-isolation", "--editable", request.getfixturevalue("source"))
    return venv


def install(venv: Path, *what: object) -> None:
    """Make an environment that has what this one has, except for `spmd_rl`, and install that."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages(venv) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # of which no `.pth` is read
    pip("install", "--target", packages(venv), *what)


def packages(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--no-deps", "--no-index", "--quiet", *arguments[1:]]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def python(venv: Path, cwd: Path, *arguments: object) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [venv / "bin" / "python", *map(str, arguments)]
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_holds_every_file_and_nothing_beside_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in ("spmd_rl", *BUNDLED):
        kept = (path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file())
        wanted = {path.as_posix() for path in kept if "__pycache__" not in path.parts}
        assert {path if name == "spmd_rl" else f"spmd_rl/bundled/{path}" for path in wanted} <= held
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"spmd_rl"}


def test_it_composes_its_own_settings(outside: Path) -> None:
    """Not those of a clone: its YAML files say so where ours are changed."""
    experiment = packages(outside / "venv") / "spmd_rl" / "bundled" / "configs" / "experiment" / "one_step.yaml"
    experiment.write_text("# @package _global_\ndefaults:\n  - override /data: one_digit_sums\nsteps: 1\n")
    script = packages(outside / "venv") / "bin" / "spmd-rl"
    asked = ("rlvr", "--cfg", "job", "+experiment=one_step", f"policy.model={outside}")
    cfg = yaml.safe_load(python(outside / "venv", outside, script, *asked))
    assert cfg["steps"] == 1 and cfg["reward"]["reasoning_gym"]["target"].startswith("rewards.")


def test_it_trains_outside_the_clone(outside: Path) -> None:
    """With a reward of a user's own, in a folder `rewards`, and one of ours beside it."""
    user = outside / "user"
    toy = Toy(user / "toy")
    rows = [json.loads(line) for line in toy.data.read_text().splitlines()]
    mixed = [row | {"domain": ("toy", "general")[number % 2]} for number, row in enumerate(rows)]
    toy.data.write_text("".join(f"{json.dumps(row)}\n" for row in mixed))
    (user / "rewards").mkdir()
    (user / "rewards" / "parity.py").write_text(REWARD)
    settings = [s for s in toy.settings() if not s.startswith("reward.")]
    settings += ["reward.toy.target=rewards.parity:Parity", "reward.general.target=rewards.general:GeneralReward"]
    settings += ["steps=1", "run.dir=run", "checkpoint.every=0"]
    python(outside / "venv", user, "-m", "spmd_rl.rlvr", *settings)
    assert "<script>" in (user / "run" / "report.html").read_text()
    assert (user / "run" / "metrics.jsonl").read_text().count("\n") == 2
    assert (user / "run" / "checkpoints" / "step-000001" / "hf" / "model.safetensors").is_file()
    samples = (user / "run" / "samples" / "step-000001.jsonl").read_text().splitlines()
    assert {(row["domain"], row["verdict"]["status"]) for row in map(json.loads, samples)} == {
        ("toy", "ok"),
        ("general", "ok"),
    }
    assert sorted(path.name for path in user.iterdir()) == ["rewards", "run", "toy"]


# -- a user's own folders and files of the same names -----------------------------------------------------------------

OURS = {
    "rewards": ("rewards.composite:CompositeReward", "rewards.choice:ChoiceReward"),
    "envs": ("envs.adapters.tool_class:ToolClassEnv", "envs.sokoban:Sokoban"),
    "configs": ("rewards.code:CodeReward", "configs.rlvr:Mine"),
    "launch": ("rewards.code:CodeReward", "launch.sidecar_keys:Mine"),
}
"""For each name a class of ours whose module the user has not, and a class whose module he has."""
CHECK = """
import hashlib, inspect, json, os, pathlib, runpy, sys
from spmd_rl.bundled import HOME
from spmd_rl.config import RlvrConfig
from spmd_rl.config.load import load
from spmd_rl.base.targets import import_target, source_digest
for place, targets in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.chdir(place)
        sys.path[0] = place
        for target in targets:
            file = pathlib.Path(inspect.getfile(import_target("key", target)))
            assert source_digest(target) == hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
            whose = "ours" if file.is_relative_to(HOME) else "the user's" if file.is_relative_to(place) else file
            print(json.dumps([place, target, whose]), flush=True)
        if "configs" in place:
            assert load("rlvr", RlvrConfig, ["data=jsonl_math"]).reward.domains["math"].target.startswith("rewards.")
        keys = runpy.run_module("spmd_rl.bundled.launch.sidecar_keys")
        assert pathlib.Path(keys["__file__"]).is_relative_to(HOME)
        os._exit(0)
    assert os.wait()[1] == 0, (place, targets)
"""


def write(place: Path, name: str, form: str) -> dict[str, str]:
    """Give the user his own `name`; return whose each target is."""
    alone, shared = OURS[name]
    if form == "file":
        (place / f"{name}.py").write_text("class Mine: pass\n")
        ours = {target: "ours" for target in OURS[name] if "Mine" not in target}
        return ours | {f"{name}:Mine": "the user's"}
    folder, module = place / name, shared.partition(":")[0].partition(".")[2]
    folder.mkdir()
    for file in ("mine", module):
        (folder / f"{file}.py").write_text(f"class Mine: pass\nclass {shared.partition(':')[2]}: pass\n")
    for file in ("tool_calls", "rows", "grids"):  # which ours must not take for their own
        (folder / f"{file}.py").write_text("raise AssertionError('a module of the user')\n")
    if form == "package":
        (folder / "__init__.py").touch()
    return {alone: "ours", shared: "the user's", f"{name}.mine:Mine": "the user's"}


@pytest.mark.parametrize("installed", ["wheel", "editable"], indirect=True)
def test_a_users_own_and_ours_work_side_by_side(installed: Path, tmp_path: Path) -> None:
    asked: dict[str, dict[str, str]] = {}
    for form in ("package", "folder", "file"):
        for names in (*((name,) for name in BUNDLED), BUNDLED):
            place = tmp_path / f"{form}-{'-'.join(names)}"
            place.mkdir()
            whose = {target: "ours" for name in ("rewards", "envs") for target in OURS[name]}
            for name in names:
                whose |= write(place, name, form)
            asked[str(place)] = whose
    questions = json.dumps({place: list(whose) for place, whose in asked.items()})
    answers = [json.loads(line) for line in python(installed, tmp_path, "-c", CHECK, questions).splitlines()]
    assert answers == [[place, *answer] for place, whose in asked.items() for answer in whose.items()]


MISTAKES = {
    "rewards.nothing:X": "what is installed, spmd_rl itself",
    "rewards.needy:X": "No module named 'rewards.gone'",
    "rewards.wrong:X": "rewards.wrong has no class X and no such function ({place}/rewards/wrong.py)",
    "envs.sokoban:Sokoban": "OSError: his own",
}
TELL = """
import sys
from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import import_target
for target in sys.argv[1:]:
    try:
        import_target("key", target)
    except UserError as error:
        print(error)
"""


def test_a_mistake_in_a_users_own_is_told_and_not_hidden_by_ours(outside: Path, tmp_path: Path) -> None:
    texts = {"rewards/needy": "import rewards.gone", "rewards/wrong": "", "envs/__init__": "raise OSError('his own')"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    lines = python(outside / "venv", tmp_path, "-c", TELL, *MISTAKES).splitlines()
    for line, (target, why) in zip(lines, MISTAKES.items(), strict=True):
        assert line.startswith(f"key: {target} cannot be imported: ") and line.endswith(why.format(place=tmp_path)), (
            line
        )


ABOUT = """
from spmd_rl.config import RlvrConfig
from spmd_rl.config.load import load
from spmd_rl.config.run_identity import identity_hash
from spmd_rl.distributed.agreement import agreed_values
from spmd_rl.base.errors import located, traceback_of
from spmd_rl.base.targets import import_target
given = ["data=jsonl_math", "data.train=rows.jsonl", "algorithm.loss=rewards.length:LengthReward"]
cfg = load("rlvr", RlvrConfig, given)
print(identity_hash(cfg), {name: value for name, value in agreed_values(cfg).items() if name.startswith("source")})
try:
    import_target("key", "envs.calculator:calculate")(None)
except Exception as error:
    print(located(error), "calculator.py" in traceback_of(error))
"""


def test_what_a_run_says_of_itself_does_not_depend_on_where_the_package_lies(outside: Path, tmp_path: Path) -> None:
    said = python(outside / "venv", tmp_path, "-c", ABOUT)
    clone = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport spmd_rl; sys.path.pop(0)\n"
    assert said == python(outside / "venv", tmp_path, "-c", clone + ABOUT)
    assert "'source of spmd_rl': '" in said and "'source of rewards.length:LengthReward': '" in said
    assert said.splitlines()[1].startswith("calculator.py:") and said.endswith("True\n"), said
