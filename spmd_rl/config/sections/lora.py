"""Adapters (LoRA) of a trained model: `policy.lora`, `critic.lora`."""

from dataclasses import dataclass

from spmd_rl.config.values import above, at_least, one_of, require


@dataclass
class LoraConfig:
    """Trained adapters on frozen weights in the compute dtype (Hu et al., arXiv 2106.09685). Needs peft."""

    rank: int = 0
    """Rank of the adapters, which need about ten times the learning rate; 0: train all weights."""
    alpha: float | None = None
    """Numerator of an adapter's factor, alpha / rank. Default: 2 x rank."""
    targets: list[str] | None = None
    """Last parts of the names of adapted linear layers, such as `[q_proj,v_proj]`. Default: all in the decoder layers,
    without stacked experts."""
    dropout: float = 0.0
    """Share of an adapter's inputs dropped in updates, whose logprobs then differ from earlier ones. Not with
    `train=megatron`."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski, arXiv 2312.03732)."""
    base: str | None = None
    """`nf4`: hold frozen weights in 4 bits (4.25 with factors; QLoRA: Dettmers et al., arXiv 2305.14314) and compute in
    the compute dtype. With `train=fsdp2`, without `tp`, `pp`, `ep` and `lora.dora`."""
    dora: bool = False
    """Also train the row lengths of adapted weights (DoRA: Liu et al., arXiv 2402.09353). With `train=fsdp2`."""

    def __post_init__(self) -> None:
        at_least(self, rank=0)
        above(self, alpha=0)
        one_of(self, base=("nf4",))
        require(not (self.base and self.dora), "dora: not supported with lora.base, whose weights have 4 bits")
        require(0 <= self.dropout < 1, f"dropout: must be in [0, 1), not {self.dropout}")
        require(self.targets is None or bool(self.targets), "targets: must name at least one layer")

    @property
    def scaling(self) -> float:
        """Factor of an adapter's output."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rslora else self.rank)
