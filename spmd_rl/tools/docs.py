"""Prints a page with every setting of every pipeline, from the schema.

    python -m spmd_rl docs > settings.md

A setting's meaning is the string below its field in `spmd_rl/config/sections/`.
"""

from collections.abc import Iterator
from itertools import groupby

from spmd_rl.base.command_line import Parser, program
from spmd_rl.config.docs import SettingEntry, entries, options
from spmd_rl.config.load import CONFIGS, build, compose
from spmd_rl.config.pipelines import PIPELINES

INTRO = """\
# Settings

Set any of these on the command line as `key=value`, or in a YAML file. Keys that you do not set take these defaults.
`--help` shows them too, and with the rest of a command line the values that this line gives them.
`--cfg job` prints the composed settings and runs nothing; `--config-dir` adds a directory of your own YAML files.
Choose from a group with `group=option` (`+experiment=option`).
"""


def markdown() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([INTRO, *_groups(), *(line for name in PIPELINES for line in _pipeline(name))])


def _groups() -> Iterator[str]:
    yield from ("## Groups", "", "| group | option | what |", "|---|---|---|")
    for group, known in options(CONFIGS).items():
        for option, summary in known.items():
            yield f"| `{group}` | `{option}` | {_cell(summary)} |"
    yield ""


def _pipeline(name: str) -> Iterator[str]:
    yield from (f"## `python -m spmd_rl.{name}`", "")
    schema = PIPELINES[name]
    rows = sorted(entries(schema, build(schema, compose(name))), key=lambda entry: "." in entry.key)
    for section, members in groupby(rows, key=lambda entry: entry.key.rpartition(".")[0].split(".")[0]):
        yield from (f"### `{section}.`" if section else "### Top level", "")
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
        yield from map(_row, members)
        yield ""


def _row(entry: SettingEntry) -> str:
    value = "required" if entry.value == "required" else f"`{_cell(entry.value)}`"
    return f"| `{entry.key}` | {entry.type} | {value} | {_cell(entry.doc)} |"


def _cell(text: str) -> str:
    # A line break in a default, such as a template's, would end the row.
    return text.replace("|", "\\|").replace("\n", "\\n")


if __name__ == "__main__":
    Parser(program("docs"), description=__doc__.splitlines()[0]).parse_args()
    print(markdown(), end="")
