"""Shows what a supervised run would do: its arithmetic, the lengths of rows, three of them as they are learnt.

    python -m spmd_rl dry_run sft data.train=rows.jsonl
    torchrun --nproc-per-node 8 -m spmd_rl.sft --dry-run data.train=rows.jsonl

Nothing is written, no weights are loaded, and torch is not imported. All rows are checked, the first ones rendered.
"""

import statistics

from rich.console import Console
from rich.text import Text

from spmd_rl.config.batch_arithmetic import describe_rows
from spmd_rl.config.model_files import describe_model
from spmd_rl.config.phases import phase
from spmd_rl.config.supervised import RowsPipelineConfig
from spmd_rl.data import Examples
from spmd_rl.errors import UserError, printable
from spmd_rl.hub import model_folder
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.tools.dry_run import SHOWN, dtype, outputs, short, table, without_torch
from spmd_rl.types import Example

RENDERED = 1000
"""Rows that are rendered for their lengths"""


def show(cfg: RowsPipelineConfig) -> None:
    """Print the preview of a run. UserError for what would end it before its first step."""
    with phase("reading the rows"):
        examples = Examples.load(cfg.data, cfg.row_kind)
        cfg.count_rows(len(examples.train))
    with phase("loading the tokenizer"), without_torch():
        policy, kwargs = cfg.policy, cfg.data.chat_template_kwargs
        tokenizer = load_tokenizer(policy.model, policy.trust_remote_code, kwargs)
    store, most = examples.train or examples.eval, cfg.data.max_tokens
    with phase("rendering the rows"):
        lengths = [_length(store[number], tokenizer) for number in range(min(len(store), RENDERED))]
    long = sum(length > most for length in lengths)
    if long == len(lengths) or (long and cfg.data.overlong == "error"):
        raise UserError(
            f"data.max_tokens={most}: {long} of {len(lengths)} rows are longer, up to {max(lengths)} tokens"
        )
    lines = [
        ("model", f"{policy.model}: {describe_model(model_folder(policy.model))}"),
        ("dtype", f"{dtype(policy.dtype)}; master weights and optimizer float32"),
        *describe_rows(len(examples.train), len(examples.eval), cfg.data, cfg.eval, cfg.train, cfg.steps),
        ("lengths", f"median {statistics.median(lengths):g}, longest {max(lengths)} tokens of the first {len(lengths)} "
                    f"rows; {long} are longer than data.max_tokens={most}"),
    ]  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table(console, "Batch arithmetic", lines)
    for number in range(min(SHOWN, len(store))):
        for conversation in store[number].conversations:
            console.print(Text(printable(f"\n{store.where(number)}, what is learnt in colour", lines=True), "bold"))
            for given, learnt in tokenizer.pieces(conversation):
                console.print(Text(short(tokenizer.visible(given)), "bright_black"), end="")
                console.print(Text(short(tokenizer.visible(learnt)), "green"), end="")
            console.print()
    table(console, "Would be written", outputs(cfg))


def _length(example: Example, tokenizer: Tokenizer) -> int:
    """The tokens of the longest conversation of a row."""
    pieces = [tokenizer.pieces(conversation) for conversation in example.conversations]
    return max(sum(len(part) for pair in one for part in pair) for one in pieces)
