"""Policy, frozen reference and critic on `FSDP2Model`, and `build`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.train.accumulate import Critic, Policy
from spmd_rl.train.base import ForwardArgs
from spmd_rl.train.fsdp2.deterministic import fix_workspace
from spmd_rl.train.fsdp2.model import FSDP2Model
from spmd_rl.train.nf4 import packing
from spmd_rl.train.row import aim, parts
from spmd_rl.train.stored_model import Source


class FSDP2Policy(FSDP2Model):
    """A causal language model that returns logprob and entropy."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        """[all] Shard the model, see `FSDP2Model`."""
        factor = logit_factor(model.config.get_text_config())
        model.set_output_embeddings(TokenHead(model.get_output_embeddings(), factor))
        super().__init__(model, *args)

    def outputs(self, micro: Batch, args: ForwardArgs) -> tuple[Tensor, ...]:
        """Return the last chunk's outputs, see `FSDP2Model`."""
        row = self.row(micro)
        aim(self.module.get_output_embeddings(), micro, row, args, self.device)
        return parts(self.predictions(micro, row), args)


class FSDP2Value(FSDP2Model):
    """A language model `with_value_head` that returns values before tokens."""

    trains_head = True

    def outputs(self, micro: Batch, args: ForwardArgs) -> tuple[Tensor, ...]:
        """Return the last chunk's outputs, see `FSDP2Model`."""
        self.module.get_output_embeddings().gives_fingerprint = args.is_fingerprint
        return (self.predictions(micro, self.row(micro))[:, 0].float(),)


def policy_of(model: nn.Module, layout: Layout, role: RoleConfig, load: Callable[..., None] | None = None) -> Policy:
    """[all] Return the policy or reference of a causal LM."""
    made = FSDP2Policy(model, layout, role.train, getattr(torch, role.dtype), role.optimizer, load)
    return Policy(made, layout, role)


def critic_of(model: nn.Module, layout: Layout, role: RoleConfig, load: Callable[..., None] | None = None) -> Critic:
    """[all] Return the critic of a model `with_value_head`."""
    return Critic(FSDP2Value(model, layout, role.train, getattr(torch, role.dtype), role.optimizer, load), layout, role)


def build(role: RoleConfig, layout: Layout, source: Source) -> Policy | Critic:
    """[all] Build the role; the journal's `loaded` counts bytes read."""
    if role.train.deterministic:
        fix_workspace()
    held = getattr(torch, role.held_dtype)
    stored = source(role, held, layout.world.progress)
    load = stored.load
    # Make the reader while the model still has the stored shapes: packing changes them.
    if role.lora.base and stored.reader is not None:
        load = packing(stored.reader(stored.model), layout.world.progress)
    built = (critic_of if role.name == "critic" else policy_of)(stored.model, layout, role, load)
    layout.world.journal.note("loaded", role=role.name, bytes=stored.num_bytes())
    return built
