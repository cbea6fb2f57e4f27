"""The text of each token id, from a local `tokenizer.json`."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.base.hub import model_folder
from spmd_rl.types import PICTURE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"


class TokenTexts:
    """Texts of one model's tokens. `missing`: why there is no tokenizer."""

    def __init__(self, model: str | None) -> None:
        """Load the tokenizer of `model`, a directory or a name of the hub, without downloading."""
        self._tokenizer, self.missing = _load(str(model)) if model else (None, "the run names no model")

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return one text per id, special tokens included. None without a tokenizer.

        A character of several tokens belongs to the last of them.
        """
        return None if self._tokenizer is None else list(_texts(self._tokenizer, ids))

    def add(self, trajectory: dict[str, Any]) -> dict[str, Any]:
        """Give each turn of a trajectory (`trajectories.whole`) its `prompt` and `tokens` as texts, or None."""
        for segment in trajectory["segments"]:
            for turn in segment["turns"]:
                prompt = self.texts(turn["prompt_ids"])
                turn["prompt"] = None if prompt is None else "".join(prompt)
                turn["tokens"] = self.texts(turn["token_ids"])
        return trajectory


def _texts(tokenizer: "Tokenizer", ids: Sequence[int]) -> Iterator[str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for index, token_id in enumerate(ids):
        # Ids of a picture are negative; a word stands for all of them.
        if token_id < 0:
            yield PICTURE if not index or ids[index - 1] >= 0 else ""
            continue
        text = stream.step(tokenizer, token_id)
        # An answer that ends within a character is shown in the form that the model left it.
        yield text if text is not None else (BROKEN if index == len(ids) - 1 else "")


@lru_cache(16)
def _load(model: str) -> tuple["Tokenizer | None", str]:
    from tokenizers import Tokenizer

    try:
        folder = model_folder(model)
    except UserError as error:
        return None, str(error)
    path = Path(folder, "tokenizer.json")
    if not path.is_file():
        return None, f"no {path}"
    try:
        return Tokenizer.from_file(str(path)), ""
    except Exception as error:  # noqa: BLE001 - the library raises no other class
        return None, f"{path}: {one_line(error)}"
