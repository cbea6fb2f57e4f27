"""The bare loop: the forwards, backwards and decodes of a step, and nothing else.

No ranks, scheduler, tickets, sidecars, publishing, sharding, logging or checks; one process, one model.

    python -m bench.bare_side WORK.json        # started by `bare.py`

It is held at the gate like any contestant, and told there which samples our door has just trained on. It decodes their
prompts with a plain KV cache, drawing at every position and then going on with the token that our side drew, so that
both compute the same tokens; rows that have ended leave the batch. Then one forward and backward over them, each prompt
once for its group, clipping, AdamW on float32 masters, and the new weights in the compute dtype. Kernels are those of
`spmd_rl/model`: what is compared is what stands around them.
"""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from bench.gate import Gate
from spmd_rl.model.attention import Packing, packed_attention
from spmd_rl.model.build import build_model
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.size import head_dim

ATTENTION = "bare"


@dataclass
class Cache:
    """Keys and values of all layers, [rows, heads, length, head_dim] each; every row at its own position."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    """int64 [rows]: where the next token goes"""
    mask: Tensor | None = None
    """bool [rows, 1, 1, length] while decoding"""

    def keep(self, rows: Tensor) -> None:
        """Only these rows, in this order."""
        self.keys = [part.index_select(0, rows) for part in self.keys]
        self.values = [part.index_select(0, rows) for part in self.values]
        self.positions = self.positions[rows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [rows, H, t, D] -> [rows, t, H, D]: whole prompts from position 0, then one token at a time."""
        if self.mask is None:
            self.keys[layer][:, :, : key.shape[2]], self.values[layer][:, :, : key.shape[2]] = key, value
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2)
        rows = torch.arange(len(query))
        self.keys[layer][rows, :, self.positions] = key[:, :, 0]
        self.values[layer][rows, :, self.positions] = value[:, :, 0]
        # the query heads of one key head stand where queries of one sequence would: no key is repeated
        grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        keys, values = self.keys[layer], self.values[layer]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.flatten(1, 2)[:, None]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packing: Packing | None = None,
    cache: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it; `packing` in training, `cache` in generation."""
    if cache is not None:
        return cache.attend(module.layer_idx, query, key, value, scaling), None
    return packed_attention(module, query, key, value, attention_mask, scaling, packing)


class Loop:
    """A model, its float32 masters and their optimizer."""

    def __init__(self, work: dict[str, Any]) -> None:
        AttentionInterface.register(ATTENTION, attention)
        whole = build_model(work["model"], torch.float32, torch.get_default_device(), attention=ATTENTION)
        self._masters = [p.detach().clone().requires_grad_() for p in whole.parameters()]
        self.model = whole.to(getattr(torch, work["dtype"]))
        self._adamw = torch.optim.AdamW(
            self._masters, lr=work["lr"], betas=work["betas"], weight_decay=work["weight_decay"], fused=True
        )
        self._clip, self._max_norm, self._temperature = work["clip"], work["max_grad_norm"], work["temperature"]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], answers: list[list[list[int]]]) -> Tensor:
        """Decode these answers to each prompt; the logprobs of their tokens, in the order they were computed."""
        config, rows = self.model.config, [answer for group in answers for answer in group]
        length = max(map(len, prompts)) + max(map(len, rows))
        heads = config.num_key_value_heads
        shape = (len(prompts), heads, length, head_dim(config))
        parts = [[self.model.lm_head.weight.new_zeros(shape) for _ in range(config.num_hidden_layers)] for _ in "kv"]
        cache = Cache(*parts, torch.tensor([len(prompt) - 1 for prompt in prompts]))
        padded = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        self.model.base_model(input_ids=padded, use_cache=False, cache=cache)
        cache.keep(torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(group) for group in answers])))
        last = torch.tensor([prompt[-1] for prompt, group in zip(prompts, answers, strict=True) for _ in group])
        logprobs = []
        for place in range(max(map(len, rows))):
            cache.mask = (torch.arange(length) <= cache.positions[:, None])[:, None, None]
            positions = cache.positions[:, None]
            out = self.model(input_ids=last[:, None], position_ids=positions, use_cache=False, cache=cache)
            log_p = (out.logits[:, -1].float() / self._temperature).log_softmax(-1)
            drawn = log_p.exp().multinomial(1)
            drawn[:, 0] = torch.tensor([row[place] for row in rows])  # our side's token instead
            logprobs.append(log_p.gather(-1, drawn)[:, 0])
            cache.positions = cache.positions + 1
            going = [i for i, row in enumerate(rows) if place + 1 < len(row)]
            last = drawn[:, 0]
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                cache.keep(torch.tensor(going, dtype=torch.int64))
                last = last[going]
        return torch.cat(logprobs)

    def train(self, prompts: list[list[int]], answers: list[list[list[int]]], advantages: list[list[float]]) -> int:
        """One update; the tokens of its forward. PPO-clip on the first update, mean over all answer tokens."""
        ids, positions, starts, parents, targets, kept, scale = [], [], [0], [], [], [], []
        for prompt, group, weights in zip(prompts, answers, advantages, strict=True):
            root = len(parents)
            end_of_prompt = len(ids) + len(prompt) - 1
            for segment, tokens, weight in [(-1, prompt, None), *((root, *pair) for pair in zip(group, weights))]:
                begin = 0 if weight is None else len(prompt)
                if weight is not None:
                    kept += [end_of_prompt, *range(len(ids), len(ids) + len(tokens) - 1)]
                    targets += tokens
                    scale += [weight] * len(tokens)
                ids += tokens
                positions += range(begin, begin + len(tokens))
                parents.append(segment)
                starts.append(len(ids))
        hidden = self.model.base_model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            packing=Packing.of(torch.tensor(starts), torch.tensor(parents), dtype=self.model.dtype),
            use_cache=False,
        ).last_hidden_state[0, torch.tensor(kept)]
        head = self.model.get_output_embeddings().weight
        logprobs, _ = token_logprobs(hidden, head, torch.tensor(targets), self._temperature)
        ratio, advantage = (logprobs - logprobs.detach()).exp(), torch.tensor(scale)
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        torch.maximum(-ratio * advantage, -clipped * advantage).mean().backward()
        self._update()
        return len(ids)

    @torch.no_grad()
    def _update(self) -> None:
        weights = list(self.model.parameters())
        for master, weight in zip(self._masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self._masters, self._max_norm, foreach=True)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        torch._foreach_copy_(weights, self._masters)


def read(path: str) -> tuple[list[list[int]], list[list[list[int]]], list[list[float]]]:
    """Prompts, answers and advantages of the samples that trained, by group, from a run's sample log."""
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in Path(path).read_text().splitlines():
        sample = json.loads(line)
        if sample["kept"]:
            groups[sample["ticket"]].append(sample)
    prompts = [group[0]["turns"][0]["prompt_ids"] for group in groups.values()]
    answers = [[sample["turns"][0]["token_ids"] for sample in group] for group in groups.values()]
    return prompts, answers, [[sample["advantage"] for sample in group] for group in groups.values()]


def main() -> None:
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    gate, loop = Gate.connect(0), Loop(json.loads(Path(sys.argv[1]).read_text()))
    step, values = 1, {}
    while True:
        prompts, answers, advantages = read(gate.arrive(step, values).path)
        loop.generate(prompts, answers)
        num_tokens = loop.train(prompts, answers, advantages)
        step, values = step + 1, {"tokens": num_tokens, "answer_tokens": sum(map(len, sum(answers, [])))}


if __name__ == "__main__":
    main()
