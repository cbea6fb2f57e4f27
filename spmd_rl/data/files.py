"""Reads the rows of a file: JSON lines, a JSON array or parquet; the first two may be compressed with gzip.

The format is detected from the content; a file's name does not matter.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spmd_rl.data.rows import Record, parse_rows, plain
from spmd_rl.errors import UserError

GZIP, PARQUET, BYTE_ORDER_MARK = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"


def read_rows(path: Path, key: str, columns: Mapping[str, str | None] | None = None) -> Iterator[Record]:
    """Yield the rows of a file. `key` is the setting that a `UserError` names, `columns` is `data.keys`."""
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}") from None
    empty = True
    with file:
        try:
            for row in parse_rows(_records(file, path, key), key, columns or {}):
                empty = False
                yield row
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{key}: {path}: broken gzip: {error}") from None
    if empty:
        raise UserError(f"{key}: {path} has no rows")


def _records(file: BinaryIO, path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Yield where each record stands, and the record."""
    head = file.read(4)
    file.seek(0)
    if head == PARQUET:
        yield from _parquet(path, key)
        return
    lines = io.BufferedReader(gzip.GzipFile(fileobj=file)) if head.startswith(GZIP) else file
    first = True
    for number, line in enumerate(lines, 1):  # as bytes: a line ends at \n alone
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        array = first and line.lstrip().startswith(b"[")
        first = False
        if array:
            line += lines.read()
        where = str(path) if array else f"{path}:{number}"
        record = _json(line, f"{key}: {where}")
        yield from ((f"{path}[{i}]", one) for i, one in enumerate(record)) if array else [(where, record)]


def _json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8, and neither gzip nor parquet") from None
    except ValueError as error:
        hint = "; CSV is not read: save it as parquet or as JSON lines" if ".csv" in where else ""
        raise UserError(f"{where}: not JSON: {error}{hint}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None


def _parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{key}: {path} is parquet, which needs pyarrow: pip install 'spmd-rl[data]'") from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                yield f"{path}[{number}]", without_nulls(record)
                number += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} is broken parquet: {str(error).splitlines()[0]}") from None


def without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a table as plain JSON. A table has all columns in all rows: there, null means absent."""
    return {name: plain(value) for name, value in record.items() if value is not None}
