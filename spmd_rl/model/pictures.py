"""Pictures of a vision-language model: the tokens, pixels and positions that stand for them, and the tower's features.

    processor = build_processor(folder)
    ids = processor.mark(encode(processor.expand(text, "<|image_pad|>", pictures)), pictures)
    shown = processor.shown([(ids, pictures)])           # pixels, and the place of each token's feature in them
    with module.tower.showing(shown.index):              # a `Tower`, see `build.py`
        module(processor.model_ids(ids), position_ids=processor.positions(ids, pictures), **shown.pixels)

Outside of the model a picture's tokens are negative ids (`types.pictures`). In its forward each becomes the model's
placeholder token, which Hugging Face's code replaces by a feature. This file chooses the feature: tokens may be fed in
any order and number, and a placeholder that the model sampled keeps its embedding.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.types.pictures import picture_ids

TRANSFORMERS = Version("5.19")
"""First version tested with pictures; 5.17 asks for torchvision."""
KEPT_BYTES = 2**28
"""Bytes of prepared pixels kept by a process."""
BLANK = (28, 28)
"""Size of the blank picture of a rank that has none."""
FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
"""SmolVLM's tokens around a part of a picture, and before the picture as a whole."""
Sample = tuple[Tensor, Sequence[bytes]]
"""A sample's token ids, int64 [T], and its pictures in order."""


class Shown(NamedTuple):
    """Pictures of a row, as the forward takes them."""

    pixels: dict[str, Tensor]
    """Keyword arguments of the forward: pixels of each picture once."""
    index: Tensor
    """int64 [P]: feature of each placeholder among those of `pixels`; -1: the token's own embedding"""


class Processor:
    """The image processor of a model. `placeholder`: token id of a picture in the model."""

    stacked = False
    """True if the module takes features as [P, 1, h], not as a tuple of [P, h]."""
    axes = 1
    """Position ids of a token."""

    def __init__(self, hf: Any, config: PreTrainedConfig) -> None:
        """hf: the image processor of Hugging Face. config: of the model."""
        self.hf, self.config, self.placeholder = hf, config, int(config.image_token_id)
        self._kept, self._num_kept = OrderedDict[bytes, dict[str, Tensor]](), 0

    def count(self, data: bytes) -> int:
        """Return the number of ids of a picture; from its size, without decoding it. UserError if it has no size."""
        raise NotImplementedError

    def text_of(self, data: bytes, placeholder: str) -> str:
        """Return the text with `count` placeholders that one of a chat template becomes."""
        raise NotImplementedError

    def expand(self, text: str, placeholder: str, pictures: Sequence[bytes]) -> str:
        """Expand a text's one placeholder a picture to as many as the picture has ids."""
        pieces = text.split(placeholder)
        return pieces[0] + "".join(
            self.text_of(data, placeholder) + piece for data, piece in zip(pictures, pieces[1:], strict=True)
        )

    def mark(self, ids: array, pictures: Sequence[bytes]) -> array:
        """Return the ids ('i') of an expanded text with the pictures' negative ids in place of the placeholders."""
        marks = iter([one for data in pictures for one in picture_ids(data, self.count(data))])
        return array("i", [next(marks) if pictures and id == self.placeholder else id for id in ids])

    def model_ids(self, ids: Tensor) -> Tensor:
        """Return the ids that the model knows."""
        return ids.masked_fill(ids < 0, self.placeholder)

    def is_placeholder(self, ids: Tensor) -> Tensor:
        """Return the mask of the model's picture tokens."""
        return (ids < 0) | (ids == self.placeholder)

    def positions(self, ids: Tensor, pictures: Sequence[bytes]) -> Tensor:
        """Return the position ids of a sample's tokens, int64 [axes, T]."""
        return torch.arange(len(ids)).expand(self.axes, -1)

    def pixels(self, data: bytes) -> dict[str, Tensor]:
        """Return the forward's keyword arguments of one picture, on the CPU."""
        key = blake2b(data, digest_size=16).digest()
        if key not in self._kept:
            found = self.hf(images=[_decoded(data)], return_tensors="pt")
            self._kept[key] = {name: found[name] for name in self.hf.model_input_names if name in found}
            self._num_kept += _num_bytes(self._kept[key])
        self._kept.move_to_end(key)
        while self._num_kept > KEPT_BYTES and len(self._kept) > 1:
            self._num_kept -= _num_bytes(self._kept.popitem(last=False)[1])
        return self._kept[key]

    def batch(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the forward's keyword arguments of several pictures."""
        every = [self.pixels(data) for data in pictures]
        return {name: torch.cat([one[name] for one in every], self._dim) for name in every[0]}

    _dim = 0

    def shown(self, samples: Iterable[Sample]) -> Shown:
        """Return the pictures of samples, each once; a blank one if there is none.

        `index` is that of all placeholders of the samples. A sample may end inside of a picture.
        """
        first: dict[bytes, int] = {}
        total, places = 0, []
        for ids, pictures in samples:
            rows = [torch.empty(0, dtype=torch.int64)]
            for data in pictures:
                count = self.count(data)
                if data not in first:
                    first[data], total = total, total + count
                rows.append(torch.arange(first[data], first[data] + count))
            known = ids[self.is_placeholder(ids)] < 0
            mine, number = torch.cat(rows), int(known.sum())
            assert number <= len(mine), f"{number} tokens of pictures that have {len(mine)}"
            places.append(torch.full(known.shape, -1).masked_scatter(known, mine))
        return Shown(self.batch([*first] or [_blank()]), torch.cat(places))


class Grids(Processor):
    """Pictures as one grid of tokens with positions of three axes (Qwen-VL)."""

    axes = 3

    def grid(self, data: bytes) -> tuple[int, int]:
        """Return the rows and columns of a picture's tokens."""
        width, height = _size(data)
        cell = self.hf.patch_size * self.hf.merge_size
        try:
            sizes = smart_resize(height, width, cell, self.hf.size["shortest_edge"], self.hf.size["longest_edge"])
        except ValueError as error:
            raise UserError(f"a picture of {width} x {height} pixels: {error}") from None
        return sizes[0] // cell, sizes[1] // cell

    def count(self, data: bytes) -> int:
        """Return the number of ids, see `Processor`."""
        rows, columns = self.grid(data)
        return rows * columns

    def text_of(self, data: bytes, placeholder: str) -> str:
        """Return the placeholders' text, see `Processor`."""
        return placeholder * self.count(data)

    def positions(self, ids: Tensor, pictures: Sequence[bytes]) -> Tensor:
        """Return time, row and column of each token; a text continues after the longer side of a picture."""
        found = super().positions(ids, pictures).clone()
        places, used = (ids < 0).nonzero()[:, 0].tolist(), 0
        for data in pictures:
            if used == len(places):
                break
            (rows, columns), begin = self.grid(data), places[used]
            end = min(begin + rows * columns, len(ids))
            number, base = torch.arange(end - begin), int(found[0, begin])
            found[:, begin:end] = base + torch.stack([0 * number, number // columns, number % columns])
            found[:, end:] += max(rows, columns) - rows * columns
            used += end - begin
        return found


class Tiles(Processor):
    """Pictures as tiles of equal numbers of tokens, and the whole as one more tile (SmolVLM)."""

    stacked = True
    _dim = 1

    def __init__(self, hf: Any, config: PreTrainedConfig) -> None:
        """Take what `Processor` takes, and count a tile's tokens."""
        super().__init__(hf, config)
        vision = config.vision_config
        self._per_tile = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def tiles(self, data: bytes) -> tuple[int, int]:
        """Return the rows and columns of tiles of a picture; (0, 0) if it is not cut."""
        width, height = _size(data)
        _, rows, columns = self.hf.get_number_of_image_patches(height, width)
        return rows, columns

    def count(self, data: bytes) -> int:
        """Return the number of ids, see `Processor`."""
        rows, columns = self.tiles(data)
        return (rows * columns + 1) * self._per_tile

    def text_of(self, data: bytes, placeholder: str) -> str:
        """Return the placeholders' text, see `Processor`."""
        rows, columns = self.tiles(data)
        tile = placeholder * self._per_tile
        lines = [
            "".join(f"{FAKE}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join([*lines, "\n" if lines else "", FAKE, WHOLE, tile, FAKE])


FAMILIES: dict[str, Callable[[Any, PreTrainedConfig], Processor]] = {
    "qwen2_5_vl": Grids,
    "qwen3_vl": Grids,
    "smolvlm": Tiles,
}
"""Model types (`model_type`) with pictures."""


def build_processor(folder: Path) -> Processor:
    """Return the processor of a model directory. UserError if it has none, or another kind of model."""
    if Version(found := transformers.__version__) < TRANSFORMERS:
        raise UserError(f"policy.model: pictures need transformers {TRANSFORMERS} or newer, not {found}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        hf = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"policy.model: the image processor of {folder} does not load: {one_line(error)}") from error
    return FAMILIES[config.model_type](hf, config)


class Features(NamedTuple):
    """The vision tower's rows for the tokens of pictures."""

    rows: Tensor
    """[R, h]: one row for each token of the pictures"""
    deep: tuple[Tensor, ...]
    """Rows, [R, h] each, added after the first layers (Qwen3-VL)"""

    def select(self, index: Tensor) -> "Features":
        """Return the rows with these numbers; R is the first after the last."""
        return Features(self.rows[index], tuple(deep[index] for deep in self.deep))

    @classmethod
    def joined(cls, several: Sequence["Features"]) -> "Features":
        """Join the rows of several pictures."""
        deep = [one.deep for one in several]
        return cls(torch.cat([one.rows for one in several]), tuple(map(torch.cat, zip(*deep, strict=True))))


class Tower:
    """The vision tower inside a module.

    Within `showing(index)` the module's forward takes `Shown.pixels` and sees the features of the index. `features` and
    `given` do it in two steps for an engine, which keeps the features.
    """

    def __init__(self, module: nn.Module, folder: Path) -> None:
        """module: of Hugging Face; its base model's `get_image_features` is replaced. folder: of the model."""
        self._folder, self._module, self._inner = folder, module, module.base_model
        self._compute, self._index = self._inner.get_image_features, None
        self._inner.get_image_features = self._choose

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters outside of the language model."""
        parts = self._module.get_decoder(), self._module.get_output_embeddings()
        own = {id(p) for part in parts for p in part.parameters()}
        return [p for p in self._module.parameters() if id(p) not in own]

    @cached_property
    def processor(self) -> Processor:
        """Processor of the model. UserError without one."""
        return build_processor(self._folder)

    @contextmanager
    def showing(self, index: Tensor) -> Iterator[None]:
        """Set the features of the forward inside. index: `Shown.index`, on the device."""
        self._index = index
        yield
        self._index = None

    def _choose(self, *args: Any, **kwargs: Any) -> Any:
        if self._index is None:
            return self._compute(*args, **kwargs)
        # Without the keyword arguments of the language model, such as `packing`.
        return self._chosen(_features(self._compute(*args, return_dict=True)), self._index)

    @torch.no_grad()
    def features(self, pixels: dict[str, Tensor]) -> Features:
        """Return the features of pictures. pixels: `Processor.batch`, on the device."""
        return _features(self._compute(**pixels, return_dict=True))

    def given(self, features: Features, index: Tensor) -> dict[str, Any]:
        """Return the forward's keyword arguments in place of pixels. index: `Shown.index` among the features."""
        return {"mm_encoder_outputs": {"image": self._chosen(features, index)}}

    def _chosen(self, features: Features, index: Tensor) -> Any:
        # A placeholder that the model has sampled is a token like others: after the last row is its own embedding.
        own = self._inner.get_input_embeddings()(index.new_full((1,), self.processor.placeholder))
        rows = torch.cat([features.rows.to(own.dtype), own])
        deep = tuple(torch.cat([one, torch.zeros_like(one[:1])]) for one in features.deep)
        chosen = Features(rows, deep).select(torch.where(index < 0, len(rows) - 1, index))
        pooled = chosen.rows[:, None] if self.processor.stacked else (chosen.rows,)
        output = BaseModelOutputWithPooling(pooler_output=pooled)
        output.deepstack_features = [(one,) for one in chosen.deep]
        return output


def _features(output: Any) -> Features:
    deep = getattr(output, "deepstack_features", None) or ()
    return Features(_flat(output.pooler_output), tuple(map(_flat, deep)))


def _flat(parts: Any) -> Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _size(data: bytes) -> tuple[int, int]:
    with _opened(data) as image:
        return image.size


def _decoded(data: bytes) -> Image.Image:
    with _opened(data) as image:
        return image.convert("RGB")


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    try:
        with Image.open(BytesIO(data)) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"a picture of {len(data)} bytes cannot be read: {one_line(error)}") from None


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _blank() -> bytes:
    file = BytesIO()
    Image.new("RGB", BLANK).save(file, "PNG")
    return file.getvalue()
