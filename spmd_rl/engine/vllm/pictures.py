"""Pictures in requests to vLLM, prepared as the trainer prepares them.

vLLM gets the ids with every placeholder and the prepared pixels, so its own processor of pictures and texts has no part
in a request. It keys prefixes and features by a name, which is a hash of the picture and the version of the weights.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.v1.engine.llm_engine import LLMEngine

from spmd_rl.model.pictures import Processor
from spmd_rl.types import Request

IMAGE = "image"


class VllmPictures:
    """Pictures of the requests of one engine."""

    def __init__(self, llm: LLMEngine, processor: Processor) -> None:
        self.processor, self._of_vllm = processor, llm.renderer.mm_processor

    def input(self, request: Request, version: int, cache_salt: str) -> MultiModalInput:
        """Return vLLM's input for the tokens and pictures of a request."""
        ids = torch.tensor(request.prompt_ids)
        names = [f"{version}-{blake2b(data, digest_size=16).hexdigest()}" for data in request.pictures]
        places, known = self._places(ids, request), self.processor.model_ids(ids).tolist()
        return mm_input(known, self._items(request.pictures), {IMAGE: names}, {IMAGE: places}, cache_salt=cache_salt)

    def _items(self, pictures: Sequence[bytes]) -> MultiModalKwargsItems:
        found = self.processor.batch(pictures)
        if self.processor.stacked:
            found = {name: row[0] for name, row in found.items()}
            tiles = [self.processor.pixels(data)["pixel_values"].shape[1] for data in pictures]
            found["num_patches"] = torch.tensor(tiles)
        pixels, divided = BatchFeature(found), MultiModalKwargsItems.from_hf_inputs
        return divided(pixels, self._of_vllm._get_mm_fields_config(pixels, {}))

    def _places(self, ids: torch.Tensor, request: Request) -> list[PlaceholderRange]:
        places, found = (ids < 0).nonzero()[:, 0], []
        for own in places.split([self.processor.count(data) for data in request.pictures]):
            begin, size = int(own[0]), int(own[-1] - own[0]) + 1
            is_embed = ids[begin : begin + size] < 0
            found.append(PlaceholderRange(begin, size, None if is_embed.all() else is_embed))
        return found
