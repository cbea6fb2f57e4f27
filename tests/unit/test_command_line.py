"""Mistakes on the command lines of all tools: one line, which says what was meant."""

import pytest

from launch import sidecar_keys
from spmd_rl.base.command_line import Parser, at_least
from spmd_rl.base.errors import one_line, printable, tell
from spmd_rl.tools import compare, convert, report
from spmd_rl.tools.doctor import __main__ as doctor
from spmd_rl.tools.view import __main__ as view


@pytest.mark.parametrize(
    ("main", "words", "line"),
    [
        (compare.main, ["a", "--kesy", "x"], "--kesy: unknown option; did you mean --keys?"),
        (compare.main, ["a", "--colour"], "--colour: unknown option; --help lists all"),
        (compare.main, [], "the following arguments are required: RUN_DIR"),
        (view.main, ["a", "--port", "x"], "--port: must be whole and at least 0, not 'x'"),
        (view.main, ["a", "--step=-1"], "--step: must be whole and at least 0, not '-1'"),
        (view.main, ["a", "--no-brower"], "--no-brower: unknown option; did you mean --no-browser?"),
        (report.main, ["a", "--steps", "3", "-5"], "--steps: must be whole and at least 0, not '-5'"),
        (
            convert.main,
            ["to-hf", "a", "b", "--max-shard-bytes", "-5"],
            "--max-shard-bytes: must be whole and at least 1, not '-5'",
        ),
        (convert.main, ["to-hf", "a", "b", "--modle", "x"], "--modle: unknown option"),
        (doctor.main, ["--wait", "nan"], "--wait: must be at least 0, not 'nan'"),
        (doctor.main, ["--onyl", "x"], "--onyl: unknown option; did you mean --only?"),
        (sidecar_keys.main, ["a", "--nodes", "x"], "--nodes: unknown option; did you mean --node?"),
    ],
)
def test_a_mistake_is_one_line(main, words: list[str], line: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and err.startswith(f"error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("given", ["1e400", "inf", "nan", "-1", "", "x", "\x1b[2J", 5000 * "9"])
def test_a_number_is_finite_and_large_enough(given: str, capsys: pytest.CaptureFixture) -> None:
    for kind in (int, float):
        parser = Parser("x")
        parser.add_argument("--n", type=at_least(0, kind))
        assert parser.parse_args(["--n", "3"]).n == 3
        with pytest.raises(SystemExit):
            parser.parse_args([f"--n={given}"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 7, 0x1B, 0x7F, 0x85, 0x9B, 0x202E, 0x2028, 0x2066, 0xFEFF, 0xDC80, 0xE0041])
def test_what_acts_on_a_terminal_is_written_as_an_escape(code: int, capsys: pytest.CaptureFixture) -> None:
    tell(f"a{chr(code)}b\nerror: forged")
    told = capsys.readouterr().err
    for text in (
        told[:-1],
        printable(chr(code)),
        one_line(f"a{chr(code)}b\nerror: c"),
        one_line(ValueError(chr(code))),
    ):
        assert text.isprintable()
    assert told.endswith("\n") and "a\\" in told and "\\nerror: forged" in told
