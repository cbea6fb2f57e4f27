"""Rewards of pictures: rules (colour with a gradient, number of shapes, size of the file) and models like CLIP.

feedback.reward.target=rewards.pictures:colour
reward.shapes.target=rewards.pictures:ShapeCount
reward.pictures.target=rewards.pictures:PreferenceScore reward.pictures.args.model=yuvalkirstain/PickScore_v1
feedback.reward.target=rewards.pictures:preference feedback.reward.args.model=/models/clip-vit-large-patch14

A rewarder gets a picture as an answer: a `data:` URL of a PNG, as `spmd_rl` writes them. The ground truth of a prompt
has its number and its colour: `3 red`.
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

CHANNELS = ("red", "green", "blue")
BRIGHT = 128
"""Least value, of 255, of a channel in a bright pixel"""
URL = "data:image/png;base64,"
TWO_RED_SQUARES = (
    f"{URL}iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAFUlEQVR4nGP4z8AARBAAZWMRIgoAAM6LB/kob57EAAAAAElFTkSuQmCC"
)
"""PNG of 6 x 4 pixels"""


def colour(images: Any, prompts: Sequence[Prompt]) -> Any:
    """Return the share of the prompt's colour in the light of each picture: 1 if there is no other.

    images: a tensor [B, 3, H, W] in 0..1, or [B, F, 3, H, W]; its methods alone are used. Returns [B], with gradient.
    """
    means = images.clamp(0, 1).mean((-2, -1) if images.dim() == 4 else (1, -2, -1))
    wanted = [next(i for i, name in enumerate(CHANNELS) if name in prompt.ground_truth.split()) for prompt in prompts]
    # A black picture has no light, so that its share must not be 1.
    return means[range(len(wanted)), wanted] / (means.sum(1) + 0.02)


def pixels(answer: str) -> tuple[int, int, bytes]:
    """Return width, height and RGB bytes of the first frame of a PNG. ValueError unless its rows have no filter."""
    if not answer.startswith(URL):
        raise ValueError("the answer is no PNG as a data: URL")
    data, place, packed, size = base64.b64decode(answer[len(URL) :]), 8, b"", (0, 0)
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        body, place = data[place + 8 : place + 8 + length], place + 12 + length
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        packed += body if kind == b"IDAT" else b""
    rows, stride = zlib.decompress(packed), 3 * size[0] + 1
    if len(rows) != stride * size[1] or any(rows[::stride]):
        raise ValueError("a PNG of another kind than 8-bit RGB without filters")
    return *size, b"".join(rows[begin + 1 : begin + stride] for begin in range(0, len(rows), stride))


def shapes(answer: str, channel: int, least: int) -> int:
    """Return the number of connected regions of at least `least` pixels that are bright in one channel."""
    width, height, data = pixels(answer)
    open_ = {i for i in range(width * height) if data[3 * i + channel] >= BRIGHT}
    count = 0
    while open_:
        found, size = [open_.pop()], 0
        while found:
            place, size = found.pop(), size + 1
            near = (place - width, place + width, place - (place % width > 0), place + ((place + 1) % width > 0))
            for other in open_.intersection(near):
                open_.remove(other)
                found.append(other)
        count += size >= least
    return count


class ShapeCount:
    """A rewarder with 1 for the right number of shapes of the right colour, less with each one too many or too few."""

    def __init__(self, least: int = 4) -> None:
        """least: pixels of a shape; smaller regions are noise."""
        self._least = least

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Count the shapes of the prompt's colour, and those of others, which are all too many."""
        number, wanted = prompt.ground_truth.split()
        counts = {name: shapes(answer, channel, self._least) for channel, name in enumerate(CHANNELS)}
        off = abs(counts.pop(wanted) - int(number)) + sum(counts.values())
        return Verdict("ok", 1 / (1 + off), {"is_right": float(off == 0)})

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield a picture with two red squares, its prompts and scores."""
        for truth, score in (("2 red", 1.0), ("3 red", 0.5), ("2 green", 0.2)):
            yield Prompt("0" * 32, (Message("user", "?"),), "shapes", truth), TWO_RED_SQUARES, score


class Compressibility:
    """A rewarder with the negative size of the PNG in thousands of bytes: plain pictures win (DDPO, arXiv
    2305.13301, with PNG in the place of JPEG)."""

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Measure the size."""
        return Verdict("ok", -len(base64.b64decode(answer.removeprefix(URL))) / 1000)


# Scores of models: the scaled cosine of the embeddings of picture and prompt over 100, as in CLIP score and PickScore
# (arXiv 2305.01569). One function serves both roads: in a sidecar, and with a gradient on the ranks' devices.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Normalisation of CLIP's pictures"""


@cache
def loaded(model: str, device: str) -> tuple[Any, Any]:
    """Return the frozen model and its tokenizer. ValueError, naming the directory, unless it is of the CLIP family."""
    from transformers import AutoModel, AutoTokenizer

    if not Path(model).is_dir() and model.count("/") != 1:
        raise ValueError(f"model={model}: no such directory; `hf download` fetches one")
    try:
        net = AutoModel.from_pretrained(model, use_safetensors=True)
    except OSError as error:
        raise ValueError(f"model={model} has no weights here: {str(error).splitlines()[0]}") from None
    if not hasattr(net, "get_image_features"):
        raise ValueError(f"model={model} embeds no pictures: it must be of the CLIP family")
    return net.eval().requires_grad_(False).to(device), AutoTokenizer.from_pretrained(model)


def preference(images: Any, prompts: Sequence[Prompt], model: str) -> Any:
    """Return the scores of pictures [B, 3, H, W] in 0..1, or of the first frames of videos, [B], with gradient."""
    import torch
    import torch.nn.functional as F

    net, tokenizer = loaded(model, str(images.device))
    images = images[:, 0] if images.dim() == 5 else images
    side = net.config.vision_config.image_size
    pixels = F.interpolate(images.clamp(0, 1).float(), (side, side), mode="bicubic", antialias=True)
    mean, std = (pixels.new_tensor(of).view(3, 1, 1) for of in (MEAN, STD))
    texts = [prompt.messages[-1].text for prompt in prompts]
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        words = _embedding(net.get_text_features(**tokens.to(images.device)))
    seen = _embedding(net.get_image_features(pixel_values=(pixels - mean) / std))
    return net.logit_scale.exp() * (F.normalize(seen, dim=-1) * F.normalize(words, dim=-1)).sum(-1) / 100


def _embedding(found: Any) -> Any:
    return getattr(found, "pooler_output", found)


class PreferenceScore:
    """A rewarder with that score, in a sidecar."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        """model: a directory, or a model of the hub. device: torch's name."""
        self._model, self._device = model, device
        if not Path(model).is_dir() and model.count("/") != 1:
            raise ValueError(f"model={model}: no such directory; `hf download` fetches one")

    def start(self) -> None:
        """Load the model, in the process that uses it."""
        loaded(self._model, self._device)

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score one picture, a `data:` URL of a PNG."""
        import torch

        width, height, data = pixels(answer)
        image = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, height, width, 3).movedim(-1, 1) / 255
        with torch.inference_mode():
            return Verdict("ok", float(preference(image.to(self._device), [prompt], self._model)[0]))
