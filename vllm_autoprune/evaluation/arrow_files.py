"""Rows of Parquet and Arrow files, which may have their pictures inside; read with pyarrow."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.tables import Number

if TYPE_CHECKING:
    import pyarrow

_ROWS = 32
"""Rows that are read at once, with their pictures."""
_STREAM = b"\xff\xff\xff\xff"
"""Mark before each message of Arrow's stream format, which ``save_to_disk`` writes."""
_INSTALL = (
    "pip install 'vllm-autoprune[data]', or export JSON lines with pictures as files"
)


def is_arrow(path: Path) -> bool:
    """Whether a file begins as Parquet or Arrow; False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(6).startswith((b"PAR1", b"ARROW1", _STREAM))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False


def read_arrow(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a file, each with its place; values are those of JSON, and pictures are data URLs.
    Raises :class:`ConfigError` with one problem.
    """
    try:
        import pyarrow
    except ImportError:
        what = "is Parquet or Arrow, which pyarrow reads"
        raise ConfigError.of(str(path), what, _INSTALL, subject="data") from None
    try:
        number = 0
        for batch in _read_batches(path):
            classes = _read_classes(batch.schema)
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", _convert_row(row, classes)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        fix = "write it again, or copy it whole"
        raise ConfigError.of(
            str(path), f"cannot be read ({reason})", fix, subject="data"
        ) from None


def _read_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow
    from pyarrow import ipc, parquet

    with pyarrow.OSFile(str(path)) as file:
        beginning = file.read(6)
        file.seek(0)
        if beginning.startswith(b"PAR1"):
            yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
        elif beginning.startswith(_STREAM):
            yield from ipc.open_stream(file)
        else:
            reader = ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _read_classes(schema: pyarrow.Schema) -> Mapping[str, Sequence[str]]:
    """Class names of columns that hold class numbers, from the schema that ``datasets`` writes."""
    described = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(described)["info"]["features"]
        return {
            name: feature["names"]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _convert_row(
    row: Mapping[str, object], classes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    converted = {name: _convert(value) for name, value in row.items()}
    for name, names in classes.items():
        number = row.get(name)
        if isinstance(number, int) and 0 <= number < len(names):
            converted[name] = names[number]
    return converted


def _convert(value: object) -> object:
    """``value`` as JSON has it; a picture becomes a data URL if it is bytes, else its path."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"}:
            content = value["bytes"]
            return value["path"] if content is None else _convert(content)
        return {name: _convert(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_convert(item) for item in value]
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Number(value)
    return str(value)
