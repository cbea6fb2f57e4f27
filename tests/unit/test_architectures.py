"""Which models can be trained, by their config.json; those without grouped attention generate natively."""

import json
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import ACCEPTED, check_architecture
from spmd_rl.config.engines import facts_of
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from tests.models import tiny
from tests.zoo import write

GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 512, "architectures": ["Gemma3ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "sliding_window": 4096}
SHORT = "samples of 100 tokens exceed the sliding window of"
LONG = "samples of 100 tokens exceed the length up to which"
CANNOT = "and cannot be trained here"


def rope(model_type: str, kind: str, limit: int) -> dict:
    """Rotary positions of one kind that are trained up to `limit`."""
    limits = {"max_position_embeddings": limit, "original_max_position_embeddings": limit}
    return {"model_type": model_type, "rope_scaling": {"type": kind, "factor": 2.0}, **limits}


@pytest.mark.parametrize(
    ("config", "engine", "line"),
    [
        ({"model_type": "llama"}, "native", ""),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "native", ""),
        ({"model_type": "qwen2", "sliding_window": 64}, "native", ""),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "vllm", f"{SHORT} qwen2, which tr"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "vllm", ""),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, "native", ""),
        (MISTRAL, "native", ""),
        ({**MISTRAL, "sliding_window": None}, "native", ""),
        (
            {**MISTRAL, "sliding_window": 64},
            "vllm",
            f"{SHORT} mistral, which training does not support: set rollout.max_prompt_",
        ),
        (
            GEMMA3,
            "native",
            "engine=native cannot run the sliding_attention layers of gemma3_text; engine=vllm or sglang can",
        ),
        ({"model_type": "cohere2"}, "native", "engine=native cannot run the sliding_attention layers of cohere2; "),
        (GEMMA3, "vllm", ""),
        (GEMMA3, "", ""),
        ({**GEMMA3, "sliding_window": 64}, "vllm", f"{SHORT} gemma3_text"),
        ({**GEMMA3, "sliding_window": 64, "layer_types": ["full_attention"]}, "native", ""),
        ({**GEMMA3, "use_bidirectional_attention": True}, "vllm", f"gemma3_text attends in both directions {CANNOT}"),
        ({"model_type": "qwen2", "is_causal": False}, "vllm", f"qwen2 attends in both directions {CANNOT}"),
        (
            {"model_type": "gemma3", "text_config": GEMMA3},
            "vllm",
            f"gemma3 has other parts than a language model {CANNOT}",
        ),
        ({"model_type": "qwen2_5_vl", "text_config": {}}, "native", ""),
        (
            {"model_type": "qwen3_vl", "text_config": {}},
            "sglang",
            "engine=sglang does not support pictures, which qwen3_vl takes; engine=native or vllm does",
        ),
        ({"model_type": "qwen3_5", "text_config": {}}, "vllm", "qwen3_5 has other parts than a language model and"),
        ({"model_type": "mamba2"}, "vllm", "mamba2 has layers whose state carries over from one sequence to"),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "sglang",
            "engine=sglang cannot run the layers of lfm2 that carry a state; engine=native",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "vllm",
            "engine=vllm cannot run the layers of qwen3_next that carry a state (its CPU kernels of gated delta nets",
        ),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "vllm", "qwen3 has linear_attention layers and"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "chunked"]},
            "",
            "mistral has chunked layers and ca",
        ),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 4},
            "native",
            "engine=native cannot run the latent attention of",
        ),
        (
            {"model_type": "unheard_of"},
            "vllm",
            f"unheard_of is not known to keep packed sequences apart {CANNOT}; these",
        ),
        ({}, "vllm", f"this model is not known to keep packed sequences apart {CANNOT}; these can: afmoe, apertus, "),
        ({"model_type": "gemma2"}, "vllm", f"gemma2 caps its attention logits {CANNOT}"),
        (
            {"model_type": "qwen3", "attn_logit_softcapping": 50.0},
            "",
            "qwen3 caps its attention logits and cannot be tr",
        ),
        ({"model_type": "llama", "final_logit_softcapping": 15.0}, "vllm", "llama caps its logits and cannot be"),
        ({"vocab_size": 260, "pad_token_id": 260}, "", "{folder}/config.json: pad_token_id 260 is outside of the voca"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "vllm", ""),
        ({"model_type": "llama", "logits_scaling": 8.0}, "vllm", "llama scales its logits and cannot be"),
        (
            {"model_type": "mamba2"},
            "vllm",
            "mamba2 has layers whose state carries over from one sequence to the ne",
        ),
        ({"architectures": ["BertForMaskedLM"]}, "vllm", "{folder} is not a causal language model but BertForMaskedLM"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "vllm", "{folder} is not a causal language model but t5"),
        (rope("llama", "llama3", 64), "native", ""),
        (rope("llama", "yarn", 64), "native", ""),
        (rope("llama", "mrope", 64), "native", f"llama has rotary positions of the type mrope {CANNOT}"),
        (rope("llama", "dynamic", 64), "native", f"{LONG} the dynamic positions of llama do not depend on other s"),
        (rope("llama", "dynamic", 100), "native", ""),
        (
            rope("phi3", "longrope", 64),
            "vllm",
            f"{LONG} the longrope positions of phi3 do not depend on other seque",
        ),
        (rope("phi3", "su", 64), "vllm", f"{LONG} the su positions of phi3 do not depend on other sequences: set "),
        (rope("phi3", "longrope", 100), "native", ""),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "bent"}}},
            "",
            "gemma3_text has rotary positions",
        ),
    ],
)
def test_what_cannot_be_trained_is_told_from_its_config(tmp_path: Path, config: dict, engine: str, line: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not line:
        _check(tmp_path, engine)
        return
    with pytest.raises(UserError) as caught:
        _check(tmp_path, engine)
    assert str(caught.value).startswith(f"policy.model: {line.format(folder=tmp_path)}")


def test_a_package_for_pictures_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = (
        "policy.model: engine=vllm needs torchvision for qwen2_5_vl, which takes pictures: pip install torchvision; or "
    )
    with pytest.raises(UserError, match=line):
        _check(tmp_path, "vllm")


def _check(folder: Path, engine: str) -> None:
    check_architecture("policy.model", folder, 100)
    if engine:
        facts_of(engine).check_model("policy.model", folder, engine)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_beyond_their_limit_a_neighbour_changes_the_positions_of_a_sequence(kind: str, tmp_path: Path) -> None:
    """Why there is one: until a row has a longer sequence, packed is alone to the bit."""
    own = {"dynamic": {"factor": 4.0}, "longrope": {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}}[kind]
    rotary = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16, **own}
    limit = {"max_position_embeddings": 16} if kind == "dynamic" else {}
    model = build_model(tiny("llama", tmp_path, rope_parameters=rotary, **limit), torch.float32, "cpu")
    hidden = {}
    for length in (0, 16, 48):  # of the neighbour
        ids, bounds = torch.arange(16 + length), torch.tensor([0, 16, 16 + length][: 2 + (length > 0)])
        positions = torch.cat([torch.arange(16), torch.arange(length)])
        with torch.no_grad():
            out = model(input_ids=ids[None], position_ids=positions[None], packing=Packing.of(bounds))
        hidden[length] = out.logits[0, :16]
    assert torch.equal(hidden[0], hidden[16]) and not torch.allclose(hidden[0], hidden[48], atol=1e-3)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"^critic.model: .*config.json: "):
        check_architecture("critic.model", tmp_path, 100)


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


@pytest.mark.parametrize("kind", ACCEPTED)
def test_the_native_engine_has_transformers_logprobs_or_refuses_by_name(kind, tmp_path):
    write(kind, tmp_path)
    try:
        module = empty_module(tmp_path, torch.float32)
    except UserError as error:
        assert str(error).startswith("policy.model: engine=native cannot run ") and kind in str(error)
        return
    engine = NativeEngine(module, max_running=2, kv_tokens=128)
    engine.load(load_file(tmp_path / "model.safetensors").items(), version=0)
    prompt = array("i", [5, 9, 20, 33, 7])
    engine.add(Request("a", prompt, 6, 1.0, seed=1))
    done = []
    while engine.num_unfinished:
        done += engine.step()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *done[0].token_ids]])
    with torch.no_grad():
        logprobs = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done[0].logprobs), wanted, atol=1e-5, rtol=0)
