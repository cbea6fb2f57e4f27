"""Tests that go wrong on purpose, each in a run of its own; see `test_parts.py`. Not collected by name."""

import os
import threading
import time
from pathlib import Path

import torch
import zmq

from spmd_rl import sidecar
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.types import Node
from tests.engines import needs_vllm, vllm_engine
from tests.models import tiny
from tests.unit.sidecar_helpers import HERE, host_of, rewards

kept = []
"""What nobody closes, and nobody collects before the end."""


def leave_open(tmp_path: Path, monkeypatch) -> None:
    """A host, and a socket whose message to a peer that is not there waits to be sent."""
    monkeypatch.syspath_prepend(str(HERE))
    opened = sidecar.connect(rewards("Number"), Node(0, 0, f"ipc://{tmp_path}/s/host"))
    scorer = opened.__enter__()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect("tcp://127.0.0.1:9")
    dealer.send(b"waits")
    kept.extend([opened, scorer, context, dealer])
    Path(os.environ["HOST_PID"]).write_text(str(host_of(scorer).pid))


def test_fails_with_a_native_engine(tmp_path: Path, monkeypatch) -> None:
    leave_open(tmp_path, monkeypatch)
    kept.append(NativeEngine(empty_module(tiny("llama", tmp_path / "model"), torch.float32), 4, 512))
    assert not kept, "on purpose"


@needs_vllm
def test_fails_with_a_vllm_engine(tmp_path: Path, monkeypatch) -> None:
    leave_open(tmp_path, monkeypatch)
    opened = vllm_engine(tiny("llama", tmp_path / "model", hidden_size=128, head_dim=32))
    kept.extend([opened, opened.__enter__()])
    assert not kept, "on purpose"


def test_hangs(tmp_path: Path, monkeypatch) -> None:
    leave_open(tmp_path, monkeypatch)
    time.sleep(10_000)


def test_leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(10_000,)).start()
