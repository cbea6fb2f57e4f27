"""Adapters (LoRA) of a model that is trained: `policy.lora`, `critic.lora`."""

from dataclasses import dataclass

from spmd_rl.config.values import above, at_least, one_of, require


@dataclass
class LoraConfig:
    """Adapters that are trained while the model's own weights stay frozen in the compute dtype (Hu et al., arXiv
    2106.09685). Needs the package peft.
    """

    rank: int = 0
    """Rank of the adapters; 0: none, all weights are trained. An adapter needs about ten times the learning rate."""
    alpha: float | None = None
    """Numerator of an adapter's factor, alpha / rank. Default: 2 x rank."""
    targets: list[str] | None = None
    """Last parts of the names of the linear layers that get an adapter, such as `[q_proj,v_proj]`. Default: all linear
    layers of the decoder layers, without stacked experts.
    """
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in updates. Their logprobs then differ from those before them. Not
    with `train=megatron`.
    """
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski, arXiv 2312.03732)."""
    base: str | None = None
    """`nf4`: hold the frozen weights under adapters in 4 bits (QLoRA: Dettmers et al., arXiv 2305.14314), 4.25 with
    their factors, and compute with them in the compute dtype. With `train=fsdp2`, without `tp`, `pp`, `ep` and
    `lora.dora`.
    """
    dora: bool = False
    """Also train the length of each row of an adapted weight (DoRA: Liu et al., arXiv 2402.09353). With
    `train=fsdp2`.
    """

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
