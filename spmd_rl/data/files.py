"""Reads the rows of a file: JSON lines, a JSON array or parquet, the first two also with gzip. The content decides."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from spmd_rl.base.errors import UserError
from spmd_rl.data.fields import plain

GZIP, PARQUET, BYTE_ORDER_MARK = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"


class Found(NamedTuple):
    """A record of a file."""

    where: str
    """`path:line`, or `path[index]`"""
    record: Any
    offset: int | None = None
    """byte offset of its line; None if it cannot be read from there"""


def read_records(path: Path, key: str) -> Iterator[Found]:
    """Yield the records of a file. key: the setting that a `UserError` names."""
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}") from None
    empty = True
    with file:
        try:
            for found in _records(file, path, key):
                empty = False
                yield found
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{key}: {path}: broken gzip: {error}") from None
    if empty:
        raise UserError(f"{key}: {path} has no rows")


def _records(file: BinaryIO, path: Path, key: str) -> Iterator[Found]:
    head = file.read(4)
    file.seek(0)
    if head == PARQUET:
        yield from _parquet(path, key)
        return
    is_plain = not head.startswith(GZIP)
    lines = file if is_plain else io.BufferedReader(gzip.GzipFile(fileobj=file))
    first, end = True, 0
    # Read as bytes, so that a line ends at \n alone: text mode would also split at \r, and offsets would be lost.
    for number, line in enumerate(lines, 1):
        begin, end = end, end + len(line)
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        array = first and line.lstrip().startswith(b"[")
        first = False
        if array:
            line += lines.read()
        where = str(path) if array else f"{path}:{number}"
        record = parse_json(line, f"{key}: {where}")
        if array:
            yield from (Found(f"{path}[{i}]", one) for i, one in enumerate(record))
        else:
            yield Found(where, record, begin if is_plain else None)


def parse_json(text: bytes, where: str) -> Any:
    """Return the value of a JSON text. UserError, which begins with `where`, for other text."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8, and neither gzip nor parquet") from None
    except ValueError as error:
        hint = "; CSV is not read: save it as parquet or as JSON lines" if ".csv" in where else ""
        raise UserError(f"{where}: not JSON: {error}{hint}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None


def _parquet(path: Path, key: str) -> Iterator[Found]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{key}: {path} is parquet, which needs pyarrow: pip install 'spmd-rl[data]'") from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for record in plain_rows(batch):
                where = f"{path}[{number}]"
                yield Found(where, table_row(record, f"{key}: {where}"))
                number += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} is broken parquet: {str(error).splitlines()[0]}") from None


def plain_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a pyarrow batch, 32-bit floats as doubles of the same decimal spelling."""
    for index, column in enumerate(batch.schema):
        if str(column.type) == "float":
            # A plain cast of 0.1f gives 0.10000000149011612, a wrong ground truth.
            batch = batch.set_column(index, column.name, batch.column(index).cast("string").cast("double"))
    return batch.to_pylist()


def table_row(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a table's record as plain JSON, without nulls, which mark absent columns. UserError, which begins with
    `where`, for bytes that are not text.
    """
    out = {}
    for name, value in record.items():
        try:
            if value is not None:
                out[name] = plain(value)
        except UnicodeDecodeError:
            raise UserError(
                f"{where}: `{name}` holds bytes that are not UTF-8: save it as text, or leave the column out"
            ) from None
    return out
