"""Pictures of rows: the forms in which datasets have them, and what is refused in a line that names file and row."""

import json
import random
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from spmd_rl.base.errors import UserError
from spmd_rl.base.pictures import UnfitPicture, plain_picture
from spmd_rl.config.schema import DataConfig
from spmd_rl.config.sections.preference import PairsConfig
from spmd_rl.config.sections.rows import RowsConfig
from spmd_rl.data import Examples, Prompts
from spmd_rl.types import ImagePart, Message, TextPart


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    """The file of a picture."""
    file = BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def noise(width: int = 20, height: int = 12, seed: int = 0) -> Image.Image:
    """A picture like no other."""
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


A, B = encoded(noise()), encoded(noise(seed=1), "JPEG", quality=95)
URL = {data: f"data:image/png;base64,{b64encode(data).decode()}" for data in (A, B)}
ASKED = ("q", A, "and", B, "?")


def shown(messages: tuple[Message, ...]) -> tuple[str | bytes, ...]:
    """The texts and the bytes of the pictures of the last message."""
    content = messages[-1].content
    parts = (TextPart(content),) if isinstance(content, str) else content
    return tuple(part.text if isinstance(part, TextPart) else part.data for part in parts)


def files(folder: Path, *rows: Any, name: str = "rows.jsonl", **pictures: bytes) -> Path:
    """A file of rows, with pictures beside it."""
    (folder / "in").mkdir(exist_ok=True)
    for stem, data in pictures.items():
        (folder / "in" / f"{stem}.png").write_bytes(data)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def prompt(path: Path, **settings: Any) -> tuple[str | bytes, ...]:
    """The last message of the only prompt of a file."""
    (one,) = Prompts.load(DataConfig(train=str(path), holdout=0, **settings)).train
    return shown(one.messages)


PLACES = [
    {"type": "text", "text": "q"},
    {"type": "image"},
    {"type": "text", "text": "and"},
    {"type": "image", "text": None},
    {"type": "text", "text": "?"},
]


def with_urls(form: Callable[[str], dict]) -> list[dict]:
    """The parts with their pictures inside."""
    left = iter(URL.values())
    return [form(next(left)) if part["type"] == "image" else part for part in PLACES]


FORMS = {
    "TRL": {"prompt": [{"role": "user", "content": PLACES}], "images": ["in/a.png", "in/b.png"]},
    "TRL, text": {"question": "q<image>and<image>?", "images": ["in/a.png", "in/b.png"]},
    "verl": {
        "prompt": [{"role": "user", "content": "q<image>and<image>?"}],
        "images": [{"bytes": None, "path": "in/a.png"}, {"image": "in/b.png"}],
        "reward_model": {"ground_truth": "1"},
    },
    "ROLL": {"prompt": "q<image>and<image>?", "images": [URL[A], b64encode(B).decode()], "reward_model": {}},
    "OpenAI": {
        "messages": [
            {"role": "user", "content": with_urls(lambda url: {"type": "image_url", "image_url": {"url": url}})}
        ]
    },
    "transformers": {"messages": [{"role": "user", "content": with_urls(lambda url: {"type": "image", "url": url})}]},
    "files": {"problem": "q<image>and<image>?", "images": ["file://in/a.png", "in/../in/b.png"]},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_all_forms_give_the_same_message(tmp_path: Path, row: dict) -> None:
    assert prompt(files(tmp_path, row | {"ground_truth": "1"}, a=A, b=B)) == ASKED


def test_without_places_pictures_come_before_the_question(tmp_path: Path) -> None:
    path = files(tmp_path, {"problem": "How many?", "image": "in/a.png", "solution": "<answer> 145° </answer>"}, a=A)
    assert prompt(path, format="{question}\nA number.") == (A, "How many?\nA number.")
    assert Prompts.load(DataConfig(train=str(path), holdout=0)).train[0].ground_truth == "145°"
    (one,) = Prompts.load(DataConfig(train=str(path), holdout=0, system="Be brief.")).train
    assert one.messages[0] == Message("system", "Be brief.") and shown(one.messages) == (A, "How many?")


def test_a_table_holds_encoded_pictures(tmp_path: Path) -> None:
    images = [[{"bytes": A, "path": "a.png"}, {"bytes": B, "path": None}]]
    table = pyarrow.table({"problem": ["q<image>and<image>?"], "images": images, "answer": ["1"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert prompt(tmp_path / "rows.parquet") == ASKED
    parquet.write_table(table.drop_columns("images").append_column("images", [[[A, B]]]), tmp_path / "rows.parquet")
    assert prompt(tmp_path / "rows.parquet") == ASKED
    examples = Examples.load(RowsConfig(train=str(tmp_path / "rows.parquet"), holdout=0), "demonstration")
    assert shown(examples.train[0].conversations[0].messages[:1]) == ASKED


def test_a_hub_dataset_is_read_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    columns = {"problem": ["q<image>and<image>?"], "answer": ["1"], "images": [[{"bytes": A}, {"bytes": B}]]}
    features = {name: datasets.Value("string") for name in ("problem", "answer")}
    found = datasets.Dataset.from_dict(
        columns, datasets.Features(features | {"images": datasets.List(datasets.Image())})
    )
    of_objects = datasets.Dataset.from_list([{"problem": "q", "answer": "1", "image": noise()}])
    for table, asked in ((found, ASKED), (of_objects, (A, "q"))):
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, table=table, **how: table)
        (one,) = Prompts.load(DataConfig(train="org/pictures", holdout=0)).train
        assert shown(one.messages) == asked


def test_rows_with_answers_have_pictures_too(tmp_path: Path) -> None:
    asked = {"role": "user", "content": PLACES}
    said = [{"role": "assistant", "content": text} for text in ("yes", "<image>")]
    path = files(tmp_path, {"messages": [asked, said[1]], "images": ["in/a.png", "in/b.png"]}, a=A, b=B)
    chat = Examples.load(RowsConfig(train=str(path), holdout=0), "demonstration").train[0].conversations[0]
    # In an answer the mark is a word like others.
    assert shown(chat.messages[:1]) == ASKED and chat.messages[1].content == "<image>"
    row = {"prompt": [asked], "chosen": said[:1], "rejected": said[1:], "pics": ["in/a.png", "in/b.png"]}
    path = files(tmp_path, row, a=A, b=B)
    pair = Examples.load(PairsConfig(train=str(path), holdout=0, keys={"images": "pics"}), "preference").train[0]
    assert [shown(chat.messages[:1]) for chat in pair.conversations] == [ASKED, ASKED]


def test_text_alone_in_parts_is_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2 + "}, "2?"]
    path = files(tmp_path, {"messages": [{"role": "user", "content": parts}], "answer": "4"}, {"question": "2 + 2?"})
    assert prompt(files(tmp_path, {"messages": [{"role": "user", "content": parts}], "answer": "4"})) == ("2 + 2?",)
    assert path


def test_a_question_of_another_picture_is_another_question(tmp_path: Path) -> None:
    rows = [{"question": "<image>How many?", "images": [f"in/{name}.png"], "answer": "1"} for name in "abab"]
    prompts = Prompts.load(DataConfig(train=str(files(tmp_path, *rows, a=A, b=B)), holdout=0))
    assert [shown(one.messages)[0] for one in prompts.train] == [A, B] and prompts.num_dropped == 2
    other = Prompts.load(DataConfig(train=str(files(tmp_path, *rows, a=B, b=A)), holdout=0))
    assert prompts.fingerprint() != other.fingerprint()


def test_a_folder_of_its_own_and_a_column_that_is_none(tmp_path: Path) -> None:
    rows, elsewhere = tmp_path / "rows", tmp_path / "elsewhere"
    rows.mkdir()
    elsewhere.mkdir()
    files(elsewhere, a=A)
    path = files(rows, {"question": "q", "images": "in/a.png", "answer": "1"})
    assert prompt(path, pictures=str(elsewhere)) == (A, "q")
    assert prompt(path, keys={"images": None}) == ("q",)


def test_rows_of_text_import_nothing_of_pictures(tmp_path: Path) -> None:
    path = files(tmp_path, {"question": "<image> is a word here", "answer": "1"})
    code = "import sys; from spmd_rl.data import Prompts; from spmd_rl.config.schema import DataConfig;"
    code += f"p = Prompts.load(DataConfig(train={str(path)!r}, holdout=0)); print(p.train[0].messages[0].content);"
    code += "assert not any(name == 'PIL' or name.startswith('PIL.') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "<image> is a word here\n"


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it has these sides."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(10_000_000), 9)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated(kind: str) -> bytes:
    """Three frames."""
    return encoded(noise(), kind, save_all=True, append_images=[noise(seed=1), noise(seed=2)])


HOSTILE = {
    "nothing": (b"", "is empty"),
    "a text": (b"<html>not found</html>", "is not a picture (PNG, JPEG"),
    "half a PNG": (A[: len(A) // 2], "is damaged: "),
    "half a JPEG": (B[: len(B) // 2], "is damaged: "),
    "a head alone": (A[:33], "is not a picture"),
    "a bomb": (bomb(60_000, 60_000), "has more than 16777216 pixels"),
    "a bomb below Pillow's limit": (bomb(9_000, 9_000), "has 9000 x 9000 pixels, more than"),
    "a line": (encoded(Image.new("RGB", (1, 100_000))), "has 1 x 100000 pixels: one side is more than 200"),
    "a GIF of frames": (animated("GIF"), "is animated"),
    "a WebP of frames": (animated("WEBP"), "is animated"),
    "a PNG of frames": (animated("PNG"), "is animated"),
    "16 bits": (encoded(Image.new("I;16", (8, 8))), "has pixels of the kind I;16"),
    "another format": (encoded(noise(), "TIFF"), "is not a picture"),
    "a large file": (A + bytes(7 << 20), "bytes; pictures have at most"),
}


def as_path(folder: Path, data: bytes) -> str:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "bad.png").write_bytes(data)
    return "in/bad.png"


WAYS: dict[str, Callable[[Path, bytes], Any]] = {
    "file": as_path,
    "URL": lambda folder, data: f"data:image/png;base64,{b64encode(data).decode()}",
    "object": lambda folder, data: {"bytes": f"data:;base64,{b64encode(data).decode()}"},
}


def refused(path: Path, place: str, **settings: Any) -> str:
    """The line about a broken row, which names its place."""
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(train=str(path), **settings))
    line = str(caught.value)
    assert line.startswith(f"data.train: {path}{place}: ") and "\n" not in line and len(line) < 600
    return line


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("data", "line"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_plain_picture_is_one_line(tmp_path: Path, data: bytes, line: str, way: Callable) -> None:
    good = {"question": "q", "image": "in/a.png", "answer": "1"}
    bad = {"question": "q <image> <image>", "images": ["in/a.png", way(tmp_path, data)], "answer": "1"}
    found = refused(files(tmp_path, good, good, bad, good, a=A), ":3")
    assert "`images[1]`: " in found and line in found


def test_a_table_with_a_damaged_picture_is_one_line(tmp_path: Path) -> None:
    images = [[{"bytes": data, "path": None}] for data in (A, B, B[:200])]
    table = pyarrow.table({"question": ["q"] * 3, "images": images, "answer": ["1"] * 3})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert "`images[0]`: it is damaged: " in refused(tmp_path / "rows.parquet", "[2]")


REFERENCES = {
    "outside": ("../secret.png", "'../secret.png' is outside of "),
    "absolute": ("/etc/passwd", "'/etc/passwd' is outside of "),
    "a link": ("in/link.png", "'in/link.png' is outside of "),
    "a folder": ("in", "'in' is no file in "),
    "a pipe": ("in/pipe.png", "'in/pipe.png' is no file in "),
    "missing": ("in/none.png", "'in/none.png' is no file in "),
    "a null": ("in/\0.png", "'in/\\x00.png'"),
    "an endless name": ("a." * 100_000, "...'"),
    "an address": ("https://example.com/a.png", "'https://example.com/a.png' is an address"),
    "text as URL": ("data:text/plain,hello", "'data:text/plain,hello' is not in base64"),
    "damaged base64": ("data:image/png;base64,AAAAA", "base64 text is damaged"),
    "a number": (7, "is a number, not a picture"),
    "an empty object": ({"bytes": None, "path": None}, "is null, not a picture"),
    "deep": (json.loads('{"image":' * 60 + '"x"' + "}" * 60), "is no file in "),
}


@pytest.mark.parametrize(("reference", "line"), REFERENCES.values(), ids=REFERENCES)
def test_no_row_reads_what_is_not_its_own(tmp_path: Path, reference: Any, line: str) -> None:
    (tmp_path / "secret.png").write_bytes(A)
    folder = tmp_path / "data"
    folder.mkdir()
    path = files(folder, {"question": "q", "images": [reference], "answer": "1"})
    (folder / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    subprocess.run(["mkfifo", str(folder / "in" / "pipe.png")], check=True)
    assert line in refused(path, ":1")


COUNTS = [
    ({"question": "<image>", "images": ["in/a.png"] * 2}, "has 2 pictures in its columns, and 1 places"),
    ({"question": "<image><image>", "images": ["in/a.png"]}, "has 1 pictures in its columns, and 2 places"),
    ({"messages": [{"role": "user", "content": PLACES}]}, "has 0 pictures in its columns, and 2 places"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "one is of 'video'"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "one is of 'input_audio'"),
]


@pytest.mark.parametrize(("row", "line"), COUNTS, ids=[line for _, line in COUNTS])
def test_no_picture_is_left_over(tmp_path: Path, row: dict, line: str) -> None:
    assert line in refused(files(tmp_path, row | {"answer": "1"}, a=A), ":1")


def test_all_pictures_of_a_row_have_a_limit(tmp_path: Path) -> None:
    large = encoded(noise(900, 900))
    row = {"question": "q", "images": ["in/a.png"] * 3, "answer": "1"}
    assert "together: make them smaller" in refused(files(tmp_path, row, a=large), ":1")


def test_a_place_in_the_format_is_a_place(tmp_path: Path) -> None:
    path = files(tmp_path, {"question": "<image>", "images": ["in/a.png"], "answer": "1"}, a=A)
    with pytest.raises(UserError, match=r"^data.format: .*rows.jsonl:1: has 1 pictures in its columns, and 2 places"):
        Prompts.load(DataConfig(train=str(path), format="<image>{question}"))


def upright(data: bytes) -> Image.Image:
    """The picture as every reader decodes it."""
    return Image.open(BytesIO(data)).convert("RGB")


TURNED = Image.Exif()
TURNED[0x0112] = 6
CLEAR = Image.new("RGBA", (8, 4), (255, 0, 0, 0))
PLAIN = {
    "PNG": (A, noise(), True),
    "grey": (encoded(noise().convert("L")), noise().convert("L").convert("RGB"), True),
    "palette": (encoded(noise().quantize(16)), noise().quantize(16).convert("RGB"), False),
    "black and white": (encoded(noise().convert("1")), noise().convert("1").convert("RGB"), False),
    "transparent": (encoded(CLEAR), Image.new("RGB", (8, 4), "white"), False),
    "WebP": (encoded(noise(), "WEBP", lossless=True), noise(), False),
    "BMP": (encoded(noise(), "BMP"), noise(), False),
    "a still GIF": (encoded(noise().quantize(16), "GIF"), noise().quantize(16).convert("RGB"), False),
    "turned": (encoded(noise(), exif=TURNED), noise().transpose(Image.Transpose.ROTATE_270), False),
}


@pytest.mark.parametrize(("data", "pixels", "is_kept"), PLAIN.values(), ids=PLAIN)
def test_the_pixels_are_those_that_a_viewer_shows(data: bytes, pixels: Image.Image, is_kept: bool) -> None:
    found = plain_picture(data)
    assert list(upright(found.data).get_flattened_data()) == list(pixels.get_flattened_data())
    assert (found.data == data) == is_kept and found.media_type == "image/png"


@pytest.mark.parametrize("how", [{"mode": "CMYK"}, {"exif": TURNED}], ids=["four inks", "turned"])
def test_a_photograph_stays_one(how: dict) -> None:
    smooth = Image.radial_gradient("L").resize((64, 32)).convert(how.pop("mode", "RGB"))
    found = plain_picture(encoded(smooth, "JPEG", quality=95, **how))
    wanted = smooth.convert("RGB").transpose(Image.Transpose.ROTATE_270) if how else smooth.convert("RGB")
    pairs = zip(upright(found.data).tobytes(), wanted.tobytes(), strict=True)
    assert found.media_type == "image/jpeg" and max(abs(a - b) for a, b in pairs) < 16
    assert plain_picture(found.data) == found


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_any_damage_is_refused_or_harmless(kind: str) -> None:
    whole, random_ = encoded(noise(32, 32), kind), random.Random(kind)
    for _ in range(150):
        data = bytearray(whole[: random_.randrange(1, len(whole) + 1)] if random_.random() < 0.5 else whole)
        for _ in range(random_.choice([0, 1, 1, 4])):
            data[random_.randrange(len(data))] = random_.randrange(256)
        try:
            found = plain_picture(bytes(data))
        except UnfitPicture as error:
            assert str(error).startswith("it ") and "\n" not in str(error)
        else:
            assert isinstance(found, ImagePart) and upright(found.data).size == Image.open(BytesIO(data)).size


def test_memory_is_bounded_before_the_pixels_are_read() -> None:
    code = (
        "import resource, sys\n"
        "from PIL import Image\n"
        "from spmd_rl.base.pictures import UnfitPicture, plain_picture\n"
        "from tests.unit.test_row_pictures import bomb\n"
        "data = bomb(30_000, 30_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    plain_picture(data)\nexcept UnfitPicture as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, grown = done.stdout.splitlines()
    # All pixels would be 2.7 GB.
    assert "16777216 pixels" in line and int(grown) < 50_000
