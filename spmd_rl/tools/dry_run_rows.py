"""Shows what a supervised run would do: its arithmetic, the lengths of rows, and three rows with trained tokens.

    python -m spmd_rl dry_run sft data.train=rows.jsonl
    torchrun --nproc-per-node 8 -m spmd_rl.sft --dry-run data.train=rows.jsonl

Nothing is written and no weights are loaded. All rows are checked, the first ones rendered.
"""

import statistics

from rich.console import Console
from rich.text import Text

from spmd_rl.base.errors import UserError, printable
from spmd_rl.base.hub import model_folder
from spmd_rl.base.waits import phase
from spmd_rl.config.batch_arithmetic import describe_rows
from spmd_rl.config.model_files import describe_model
from spmd_rl.config.supervised import RowsPipelineConfig
from spmd_rl.data import Examples
from spmd_rl.data.row_store import RowStore
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.tools.dry_run import SHOWN, dtype, outputs, short, table, without_torch

RENDERED = 1000
"""Number of rows to render for their lengths"""


def show(cfg: RowsPipelineConfig) -> None:
    """Print a run's preview. UserError for mistakes that would end it before its first step."""
    with phase("reading the rows"):
        examples = Examples.load(cfg.data, cfg.row_kind)
        cfg.count_rows(len(examples.train))
    with phase("loading the tokenizer"), without_torch(cfg.policy.model):
        policy, kwargs = cfg.policy, cfg.data.chat_template_kwargs
        tokenizer = load_tokenizer(policy.model, policy.trust_remote_code, kwargs)
    most, stores = cfg.data.max_tokens, {"training": examples.train, "held-out": examples.eval}
    with phase("rendering the rows"):
        lengths = {name: _lengths(store, tokenizer) for name, store in stores.items() if store}
    long = {name: sum(length > most for length in found) for name, found in lengths.items()}
    for name, found in lengths.items():
        if (name == "training" and long[name] == len(found)) or (long[name] and cfg.data.overlong == "error"):
            line = f"{long[name]} of {len(found)} {name} rows are longer, up to {max(found)} tokens"
            raise UserError(f"data.max_tokens={most}: {line}")
    lines = [
        ("model", f"{policy.model}: {describe_model(model_folder(policy.model))}"),
        ("dtype", f"{dtype(policy.dtype)}; master weights and optimizer float32"),
        *describe_rows(len(examples.train), len(examples.eval), cfg.data, cfg.eval, cfg.train, cfg.steps),
        *((name, f"median {statistics.median(found):g}, longest {max(found)} tokens of the first {len(found)} rows; "
                 f"{long[name]} are longer than data.max_tokens={most}") for name, found in lengths.items()),
    ]  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table(console, "Batch arithmetic", lines)
    store = examples.train
    for number in range(min(SHOWN, len(store))):
        for conversation in store[number].conversations:
            console.print(Text(printable(f"\n{store.where(number)}, what is learnt in colour", lines=True), "bold"))
            for given, learnt in tokenizer.pieces(conversation):
                console.print(Text(short(tokenizer.visible(given)), "bright_black"), end="")
                console.print(Text(short(tokenizer.visible(learnt)), "green"), end="")
            console.print()
    table(console, "Would be written", outputs(cfg))


def _lengths(store: RowStore, tokenizer: Tokenizer) -> list[int]:
    lengths = []
    for number in range(min(len(store), RENDERED)):
        try:
            pieces = [tokenizer.pieces(conversation) for conversation in store[number].conversations]
        except UserError as error:
            raise UserError(f"{store.where(number)}: {error}") from None
        lengths.append(max(sum(len(part) for pair in one for part in pair) for one in pieces))
    return lengths
