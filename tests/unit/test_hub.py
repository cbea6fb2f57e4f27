"""Names of the hub: told apart from paths, downloaded once, and found again without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.base.hub import HubDataset, hub_dataset, hub_id, model_folder
from tests.fake_hub import COMMIT, fake_hub

SCRIPT = """
import json, os, sys
from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import fetch_config, fetch_weights, model_folder
def files(name): return sorted(os.listdir(model_folder(name)))
try:
    name = fetch_config("policy.model", sys.argv[1])
    print(name, *files(name), sep="|")
    fetch_weights("policy.model", name)
    print(name, *files(name), sep="|")
    assert fetch_config("policy.model", sys.argv[1], wait=True) == name
except UserError as error:
    print(error)
assert not {"torch", "transformers"} & sys.modules.keys()
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-0.5B", ("Qwen/Qwen2.5-0.5B", None)),
        ("Qwen/Qwen3-8B@refs/pr/3", ("Qwen/Qwen3-8B", "refs/pr/3")),
        ("hf:gpt2@v1", ("gpt2", "v1")),
        ("hf:here/model", ("here/model", None)),
        ("here/model", None),
        ("here/typo", None),
        ("gpt2", None),
        ("./Qwen/Qwen3", None),
        ("../Qwen/Qwen3", None),
        ("/Qwen/Qwen3", None),
        ("~/Qwen3", None),
        ("a/b/c", None),
        ("a--b/c", None),
    ],
)
def test_what_is_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(name) == found
    if found is None:
        assert model_folder(name) == Path(name).expanduser()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, None, None)),
        ("openai/gsm8k:main", ("openai/gsm8k", None, "main", None)),
        ("openai/gsm8k:main:test[:10%]", ("openai/gsm8k", None, "main", "test[:10%]")),
        ("a/b:train", ("a/b", None, None, "train")),
        ("a/b:train[:9]", ("a/b", None, None, "train[:9]")),
        ("a/b@refs/pr/1:c::", None),
        ("a/b@v1:c:val", ("a/b", "v1", "c", "val")),
        ("hf:imdb:test", ("imdb", None, None, "test")),
        ("hf:a/rows.jsonl", ("a/rows.jsonl", None, None, None)),
        ("a/rows.jsonl", None),
        ("a/train.parquet", None),
        ("a/*", None),
        ("here/b", None),
        ("imdb", None),
    ],
)
def test_what_is_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_dataset(source) == (found and HubDataset(*found))


def fetch(place: Path, name: str, **env: str) -> list[str]:
    """The lines that a process of its own prints, which fetches a model into a cache in `place`."""
    env = {**os.environ, "HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    done = subprocess.run([sys.executable, "-c", SCRIPT, name], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_comes_in_two_steps_and_stays(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "acme" / "tiny"
    (repo / "onnx").mkdir(parents=True)
    small = ["chat_template.jinja", "config.json", "tokenizer.json"]
    for name in (*small, "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors"):
        (repo / name).write_text(json.dumps({"file": name}))
    pinned = f"acme/tiny@{COMMIT}"
    with fake_hub(tmp_path / "hub") as url:
        lines = fetch(tmp_path, "acme/tiny", HF_ENDPOINT=url)
        assert lines == ["|".join([pinned, *small]), "|".join([pinned, *sorted([*small, "model.safetensors"])])]
        missing = fetch(tmp_path, "acme/none", HF_ENDPOINT=url)
    assert missing == [
        "policy.model: no directory acme/none, and the hub has no such model (if it is private: `hf auth login`)"
    ]
    assert [line.split("|")[0] for line in fetch(tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")] == [pinned, pinned]
    assert fetch(tmp_path, "acme/other@v2", HF_HUB_OFFLINE="1") == [
        "policy.model: no directory acme/other, and the hub cannot be reached (offline, because HF_HUB_OFFLINE is "
        "set): run `hf download acme/other --revision v2` on a machine with network access"
    ]
