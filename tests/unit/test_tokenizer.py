"""The tokenizer: template, stop tokens, and the mistakes a model directory can hold."""

import json
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from spmd_rl.base.errors import UserError
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types import ImagePart, Message, TextPart

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer: one token a byte, <s> and </s>, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    return tmp_path


def test_text_in_parts_is_rendered_as_one_text_and_an_image_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    parts = (TextPart("2 + "), TextPart("2?"))
    assert tokenizer.render([Message("user", parts)]) == tokenizer.render([Message("user", "2 + 2?")])
    with pytest.raises(UserError, match=r"^policy.model: a prompt holds an image, which needs a processor"):
        tokenizer.render([Message("user", (*parts, ImagePart("image/png", b"\x89")))])


def test_template_is_followed_with_a_generation_prompt(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.render([Message("user", "hi")])
    assert isinstance(ids, array) and ids.typecode == "i"
    assert list(ids).count(256) == 2  # <s> twice, as one token each
    assert tokenizer.decode(ids) == "user:hiassistant:"  # special tokens are skipped


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError: "),
        ("{{ range(10 ** 9) | length }}", "fails: OverflowError: "),
        ("{{ 'x' * 2 ** 25 }}", "makes 33554432 characters out of one prompt"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError: "),
    ],
)
def test_a_template_that_overflows_is_told_in_one_line(folder: Path, template: str, line: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    with pytest.raises(UserError) as told:
        load_tokenizer(folder).render([Message("user", "hi")])
    assert line in str(told.value) and "\n" not in str(told.value)


def test_without_template_contents_are_concatenated(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.render([Message("system", "a b"), Message("user", " c")])
    assert len(ids) == 5 and tokenizer.decode(ids) == "a b c"


def test_decode_keeps_spaces(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    settings = "a .  b , don ' t"
    ids = tokenizer.render([Message("user", settings)])
    assert settings in tokenizer.decode(ids)


def test_stop_ids_are_those_of_all_three_files(folder: Path) -> None:
    assert load_tokenizer(folder).stop_ids == (5, 7, 257)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert load_tokenizer(folder).stop_ids == (257,)


def test_template_that_refuses_is_a_users_mistake(folder: Path) -> None:
    with pytest.raises(UserError, match="no system here"):
        load_tokenizer(folder).render([Message("system", "x")])


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[]"])
def test_missing_or_broken_tokenizer(folder: Path, text: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_directory_is_named() -> None:
    with pytest.raises(UserError, match="/nowhere/model"):
        load_tokenizer("/nowhere/model")


def test_broken_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json"):
        load_tokenizer(folder)


def test_code_of_a_model_directory_is_not_run_unasked(folder: Path) -> None:
    settings = {"tokenizer_class": "Foo", "auto_map": {"AutoTokenizer": ["foo.Foo", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "foo.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="trust_remote_code"):
        load_tokenizer(folder)


THINKING = "{% if enable_thinking is defined and not enable_thinking %}<s>off{% endif %}"


def test_variables_of_the_template_are_passed_on_and_a_misspelt_one_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE + THINKING
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    say = [Message("user", "hi")]
    plain = load_tokenizer(folder).render(say)
    off = load_tokenizer(folder, chat_template_kwargs={"enable_thinking": False}).render(say)
    assert list(off[: len(plain)]) == list(plain) and len(off) == len(plain) + len(["<s>", *"off"])
    with pytest.raises(
        UserError, match=r"^data.chat_template_kwargs.thinking: .* does not use it \(it uses: enable_th"
    ):
        load_tokenizer(folder, chat_template_kwargs={"thinking": False})


def test_text_with_its_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.visible(tokenizer.render([Message("user", "hi")])) == "<s>user:hi<s>assistant:"
    assert tokenizer.visible([*tokenizer.encode("hi"), 257]) == "hi</s>"


@pytest.mark.parametrize(("size", "fits"), [(258, True), (257, False), (100, False)])
def test_a_tokenizer_beyond_its_model_is_refused(folder: Path, size: int, fits: bool) -> None:
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": size}}))
    if fits:
        assert load_tokenizer(folder).stop_ids
        return
    with pytest.raises(
        UserError, match=rf"has more tokens than its model, which has {size}: '</s>' is number 257; give"
    ):
        load_tokenizer(folder)


def test_a_token_for_images_may_lie_beyond_the_model(folder: Path) -> None:
    """Gemma 3 has one such."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"extra_special_tokens": {"image_token": "<image>"}}
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 258}))
    assert load_tokenizer(folder).encode("<image>").tolist() == [258]
