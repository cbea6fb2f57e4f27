"""The shared objects of one child's checks: world, tiny model, policy and engines, each made on first use."""

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spmd_rl import engine, train, weights
from spmd_rl.config.schema import EngineConfig, PolicyConfig, RlvrConfig, RolloutConfig, RunConfig, TrainConfig
from spmd_rl.distributed import World
from spmd_rl.tools.doctor.machine import scratch

MODEL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""Configuration that all kernels accept, with two million weights."""


class Bench:
    """The shared objects of the checks that need torch, on one rank."""

    def __init__(self, run_dir: str, folder: Path, stack: ExitStack) -> None:
        """Keep `stack`, on which resources are pushed for closing. folder: for the tiny model's files."""
        self._run_dir, self.folder, self._stack = Path(run_dir), folder, stack
        self._engines: dict[str, Any] = {}
        self._publishers: dict[str, weights.Publisher] = {}
        self.answers: dict[str, list[list[int]]] = {}
        """Last answers of each engine, by name."""
        self.version = 0

    @cached_property
    def cfg(self) -> RlvrConfig:
        """Settings of a run of the tiny model."""
        dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
        return RlvrConfig(
            run=RunConfig(name="doctor", dir=str(self.folder)),
            policy=PolicyConfig(model=str(self._write_model()), dtype=dtype, lr=1e-3),
            train=TrainConfig(offload=True),
            engine=EngineConfig(max_running=8, kv_tokens=8192),
            rollout=RolloutConfig(max_prompt_tokens=64, max_new_tokens=64),
        )

    def _write_model(self) -> Path:
        path = self.folder / "model"
        if not path.exists():
            # The same weights on every rank, without a change of the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                LlamaForCausalLM(MODEL).save_pretrained(path)
        return path

    @cached_property
    def world(self) -> World:
        """[all] World of all ranks."""
        return self._stack.enter_context(World.open(self.folder, self.cfg.journal.stall_seconds))  # [all]

    @cached_property
    def shared(self) -> Path:
        """[all] Temporary directory next to the run directory, made by rank 0."""
        made = None
        if self.world.rank == 0:
            made = str(self._stack.enter_context(scratch(self._run_dir)))
        return Path(self.world.broadcast("doctor: shared directory", made))  # [all]

    @cached_property
    def policy(self) -> train.base.PolicyRole:
        """[all] Tiny model as a trained role."""
        return train.build_role(self.cfg.role("policy"), self.world)  # [all]

    def engine(self, name: str) -> Any:
        """[all] Return the engine of that name, started on first use."""
        if name not in self._engines:
            cfg = self.cfg
            cfg.engine.name = name
            self._engines[name] = engine.build(cfg.engine, cfg.policy, cfg.train.offload, self.world)  # [all]
        return self._engines[name]

    def publish(self, name: str) -> dict[str, float]:
        """[all] Publish the policy's weights to an engine, with a probe; return the metrics."""
        if name not in self._publishers:
            self._publishers[name] = weights.build(self.policy, self.engine(name), self.world)
        self.version += 1
        return self._publishers[name](version=self.version)  # [all]

    @property
    def has_world(self) -> bool:
        """True once the ranks have formed their world."""
        # `cached_property` stores its value there; `hasattr` would form the world.
        return "world" in self.__dict__

    def finish(self, name: str) -> None:
        """[all] Wait until all ranks have finished a check, if there is a world."""
        if self.has_world:
            self.world.barrier(f"doctor: {name}")  # [all]

    def close(self) -> None:
        """Free the engines; only after success, since an engine's own groups may wait for other ranks."""
        for made in self._engines.values():
            made.close()
