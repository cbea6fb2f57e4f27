"""Which models can be trained, by their config.json; those without grouped attention generate natively."""

import json
from array import array
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

from spmd_rl.config.architectures import check_architecture
from spmd_rl.engine.native import NativeEngine, empty_module
from spmd_rl.errors import UserError
from spmd_rl.types import Request

GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 512, "architectures": ["Gemma3ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "sliding_window": 4096}


@pytest.mark.parametrize(
    ("config", "engine", "line"),
    [
        ({}, "native", ""),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "native", ""),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, "native", ""),
        (MISTRAL, "native", ""),
        ({**MISTRAL, "sliding_window": 64}, "vllm", "samples of 100 tokens exceed the sliding window of mistral"),
        (GEMMA3, "native", "engine=native cannot run the sliding_attention layers of gemma3_text; engine=vllm can"),
        ({"model_type": "gemma3", "text_config": GEMMA3}, "native", "engine=native cannot run the sliding_attention"),
        (GEMMA3, "vllm", ""),
        (GEMMA3, "", ""),
        (
            {"model_type": "x", "layer_types": ["full_attention", "chunked"]},
            "native",
            "engine=native cannot run the chu",
        ),
        ({"model_type": "gemma2"}, "vllm", "gemma2 caps its attention logits and cannot be trained here; Llama, "),
        ({"model_type": "y", "attn_logit_softcapping": 50.0}, "", "y caps its attention logits and cannot be trained"),
        ({"vocab_size": 260, "pad_token_id": 260}, "", "{folder}/config.json: pad_token_id 260 is outside of the voca"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "vllm", ""),
        ({"model_type": "granite_swa", "logits_scaling": 8.0}, "vllm", "granite_swa scales its logits and cannot be"),
        ({"model_type": "nanochat", "final_logit_softcapping": 15.0}, "vllm", "nanochat caps its logits and cannot be"),
        ({"model_type": "mamba2"}, "vllm", "mamba2 has recurrent layers and cannot be trained here"),
        ({"architectures": ["BertForMaskedLM"]}, "vllm", "{folder} is no causal language model but BertForMaskedLM"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "vllm", "{folder} is no causal language model but t5"),
    ],
)
def test_what_cannot_be_trained_is_told_from_its_config(tmp_path: Path, config: dict, engine: str, line: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not line:
        check_architecture("policy.model", tmp_path, engine, 100)
        return
    with pytest.raises(UserError) as caught:
        check_architecture("policy.model", tmp_path, engine, 100)
    assert str(caught.value).startswith(f"policy.model: {line.format(folder=tmp_path)}")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"^critic.model: .*config.json: "):
        check_architecture("critic.model", tmp_path, "", 100)


@pytest.mark.parametrize("kind", [GPT2Config, OPTConfig])
def test_models_older_than_grouped_attention_generate_natively(tmp_path: Path, kind: type) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 64}
    torch.manual_seed(0)
    own = {"ffn_dim": 128, "word_embed_proj_dim": 64} if kind is OPTConfig else {}
    reference = AutoModelForCausalLM.from_config(kind(vocab_size=260, **sizes, **own)).eval()
    for weight in reference.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    reference.config.save_pretrained(tmp_path)
    engine = NativeEngine(empty_module(tmp_path, torch.float32), max_running=2, kv_tokens=256)
    engine.load(reference.named_parameters(), version=0)
    prompts = [array("i", range(5, 25)), array("i", range(40, 47))]
    for i, ids in enumerate(prompts):
        engine.add(Request(str(i), ids, max_new_tokens=8, temperature=0.0, seed=0, order=(i,)))
    answers = {}
    while engine.num_unfinished:
        answers |= {completion.id: list(completion.token_ids) for completion in engine.step()}
    for i, ids in enumerate(prompts):
        tokens = list(ids)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answers[str(i)] == tokens[len(ids) :]
