"""Tokens, positions and features of pictures against Hugging Face's own processors and models."""

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from spmd_rl.base.errors import UserError
from spmd_rl.batch import Ragged, pack
from spmd_rl.config.architectures import check_architecture
from spmd_rl.learn.hints import with_hints
from spmd_rl.model.build import build_model
from spmd_rl.model.tokenizer import Tokenizer, load_tokenizer
from spmd_rl.types import Conversation, ImagePart, Message, Sample, Verdict
from spmd_rl.types.pictures import picture_ids, split_pictures
from tests.models import tiny
from tests.toy_vlm import VLM_KINDS, toy_vlm
from tests.vlm_training import asked, png, turn

SIZES = [(28, 28), (56, 84), (100, 37), (300, 20), (64, 64), (65, 64), (31, 200), (512, 384), (1, 1), (3, 50)]


@pytest.fixture(scope="module", params=VLM_KINDS)
def path(request, tmp_path_factory) -> Path:
    return toy_vlm(request.param, tmp_path_factory.mktemp("model"), tower={"initializer_range": 0.2})


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def test_a_pictures_tokens_are_those_that_its_pixels_make(tokenizer: Tokenizer, path: Path) -> None:
    processor = tokenizer.processor
    tower = build_model(path, torch.float32, "cpu", attention="sdpa").tower
    for number, size in enumerate(SIZES):
        data = png(number, size)
        features = tower.features(processor.pixels(data))
        assert len(features.rows) == processor.count(data)
        text = processor.expand("a<x>b", "<x>", [data])
        assert text.count("<x>") == processor.count(data)
        if path.name and processor.stacked:
            rows, columns = processor.tiles(data)
            wanted = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<x>", "<global-img>")
            assert text == f"a{wanted}b"
        else:
            grid = processor.pixels(data)["image_grid_thw"][0]
            assert grid.tolist() == [1, *(2 * side for side in processor.grid(data))]
    with pytest.raises(UserError, match="cannot be read"):
        processor.count(b"no picture")


def test_given_features_are_those_of_hugging_face(tokenizer: Tokenizer, path: Path) -> None:
    processor, pictures = tokenizer.processor, (png(1), png(2, (40, 90)))
    ids = torch.tensor(tokenizer.render([asked("See ", pictures[0], " and ", pictures[1], "?")]))
    # The model may sample a placeholder: a token like others, and as good as one with the same embedding.
    sampled, twin = torch.tensor([65, processor.placeholder, 66]), torch.tensor([65, 99, 66])
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    for module in (plain, model):
        table = module.get_input_embeddings().weight.data
        table[99] = table[processor.placeholder]
    typed = {"mm_token_type_ids": (torch.cat([ids, twin]) < 0).long()[None]} if processor.axes > 1 else {}
    with torch.no_grad():
        wanted = plain(processor.model_ids(torch.cat([ids, twin]))[None], **processor.batch(pictures), **typed).logits
    every = torch.cat([ids, sampled])
    where = processor.positions(every, pictures)
    positions = where[:, None] if processor.axes > 1 else where
    # One picture twice is computed once.
    shown = processor.shown([(every, pictures), (ids, pictures)])
    index = shown.index[: int(processor.is_placeholder(every).sum())]
    inputs = {"input_ids": processor.model_ids(every)[None], "position_ids": positions}
    with torch.no_grad(), model.tower.showing(index):
        assert torch.equal(model(**inputs, **shown.pixels).logits, wanted)
    features = model.tower.features(shown.pixels)
    assert len(features.rows) == sum(map(processor.count, pictures))
    with torch.no_grad():
        assert torch.equal(model(**inputs, **model.tower.given(features, index)).logits, wanted)
    # A sample may end inside of a picture.
    cut = int((ids < 0).nonzero()[-1])
    assert torch.equal(processor.positions(ids[:cut], pictures), where[:, :cut])
    assert torch.equal(processor.shown([(ids[:cut], pictures)]).index, index[: int((ids[:cut] < 0).sum())])


def test_texts_and_pictures_must_fit(tokenizer: Tokenizer) -> None:
    place = tokenizer.visible([tokenizer.processor.placeholder])
    with pytest.raises(UserError, match=f"1 times {place.replace('|', '.')}.* and 0 pictures"):
        tokenizer.render([Message("user", f"what is {place}")])
    answer = Message("assistant", (ImagePart("image/png", png(1)),))
    with pytest.raises(UserError, match="cannot be learnt"):
        tokenizer.pieces(Conversation((Message("user", "draw"), answer)))


def test_pictures_of_a_conversation_are_those_of_its_turns(tokenizer: Tokenizer) -> None:
    one, two, last = png(1), png(2), png(3)
    said = [asked(one, "a", two), Message("assistant", "b"), asked("c"), Message("assistant", "d"), asked(last)]
    pieces = tokenizer.pieces(Conversation(tuple(said)))
    assert split_pictures([given for given, _ in pieces], (one, two, last)) == [(one, two), ()]
    count = tokenizer.processor.count
    marks = [id for id in pieces[0][0] if id < 0]
    assert marks == [*picture_ids(one, count(one)), *picture_ids(two, count(two))]
    bridge = tokenizer.bridge([asked("e", last)]).token_ids
    assert [id for id in bridge if id < 0] == picture_ids(last, count(last)).tolist()


def test_a_batch_keeps_the_pictures_of_each_sample(tokenizer: Tokenizer) -> None:
    one, two = png(1), png(2)
    given = array("i", [1, *picture_ids(one, 3), 2])
    seen = turn(given, array("i", [3]), (one, two)), turn(given, array("i", [4]), (two,))
    turns = [seen, (turn(given[:1], array("i", [5])),)]
    batch = pack([Sample(0, number, own, Verdict("ok")) for number, own in enumerate(turns)], seen=True)
    assert batch.encoded_pictures == [(one, two, two), ()]
    assert batch.select([1, 0, 0]).encoded_pictures == [(), (one, two, two), (one, two, two)]
    assert pack([], seen=True).encoded_pictures == [] and pack([]).pictures is None
    batch.hints = Ragged(torch.tensor([7, 8], dtype=torch.int32), torch.tensor([0, 2, 2]))
    assert with_hints(batch).encoded_pictures == batch.encoded_pictures


def test_which_can_be_trained(path: Path, tmp_path: Path) -> None:
    check_architecture("policy.model", path, 100)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    check_architecture("policy.model", tmp_path, 100)
    for wrong, reason in (
        ({"model_type": "mamba"}, "a language model of the type mamba"),
        ({"layer_types": ["linear_attention"]}, "linear_attention layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text | wrong}))
        with pytest.raises(UserError, match=f"has {reason} and cannot be trained"):
            check_architecture("policy.model", tmp_path, 100)


TEXT_ALONE = """
import sys
import torch
import spmd_rl.engine.native.engine, spmd_rl.train.fsdp2.backend
from spmd_rl.model.build import build_model, build_on_meta
from spmd_rl.model.tokenizer import load_tokenizer
path = sys.argv[1]
build_model(path, torch.float32, "cpu"), build_on_meta(path, torch.float32), load_tokenizer(path)
foreign = ("spmd_rl.model.pictures", "spmd_rl.engine.native.pictures", "spmd_rl.base.pictures")
print([name for name in sys.modules if name.startswith(foreign)])
"""


def test_a_model_of_text_alone_imports_nothing_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEXT_ALONE, str(tiny("llama", tmp_path / "model"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Not Pillow, which transformers imports itself where it is installed.
    assert done.stdout.splitlines()[-1] == "[]"
