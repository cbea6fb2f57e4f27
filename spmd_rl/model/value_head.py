"""A critic's model: a causal language model whose output embedding gives one number a token."""

from torch import Tensor, nn


def with_value_head(model: nn.Module, bias: bool = True) -> nn.Module:
    """The causal language model with a value head as its output embedding, in place: [.., hidden] -> [.., 1].

    The head starts at 0, so that the first advantages are plain returns, and nothing random is drawn.
    """
    embedding = model.get_output_embeddings().weight
    head = _ValueHead(embedding.shape[1], 1, bias, device=embedding.device, dtype=embedding.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.set_output_embeddings(head)
    return model


def head_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's value head by name: no language model that is stored has them."""
    own = [*model.get_output_embeddings().parameters()]
    return {name: p for name, p in model.named_parameters() if any(p is one for one in own)}


class _ValueHead(nn.Linear):
    gives_fingerprint = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gives_fingerprint:
            return hidden.float().sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
        return super().forward(hidden).clone()  # a view, which a product with three dimensions is, would make FSDP warn
