"""Folders that a library wrote: ``save_to_disk``, ImageFolder, Parquet shards of one split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.records import parse, read_lines

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of ImageFolder's metadata file, which is in the folder or in a sub-folder per split."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?\.parquet")


def find_record_files(folder: Path) -> Sequence[Path]:
    """The files that hold the records of ``folder``; empty if no library wrote the folder.

    Raises :class:`ConfigError` if it has several splits.
    """
    saved = _read_object(folder / "state.json").get("_data_files")
    if isinstance(saved, list):
        names = [file.get("filename") for file in saved if isinstance(file, dict)]
        return [folder / name for name in names if isinstance(name, str)]
    splits = _read_object(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        return find_record_files(
            _choose(folder, [folder / str(name) for name in splits])
        )
    for name in METADATA:
        if (folder / name).is_file():
            return [folder / name]
    inner = sorted(path for name in METADATA for path in folder.glob(f"[!._]*/{name}"))
    if inner:
        return [_choose(folder, inner)]
    return _find_shards(folder) or _find_shards(folder / "data")


def _find_shards(folder: Path) -> Sequence[Path]:
    """Parquet files of one split, in order."""
    shards = dict[str, list[Path]]()
    for path in sorted(folder.glob("[!.]*.parquet")):
        if match := _SHARD.fullmatch(path.name):
            shards.setdefault(match[1], []).append(path)
    if len(shards) > 1:
        _choose(folder, [files[0] for files in shards.values()])
    return next(iter(shards.values()), [])


def _choose(folder: Path, parts: Sequence[Path]) -> Path:
    """The only one of ``parts``, which are splits; raises :class:`ConfigError` for several."""
    if len(parts) != 1:
        what = (
            f"has {len(parts)} splits: {', '.join(part.name for part in parts)[:160]}"
        )
        if len({part.name for part in parts}) < len(parts):
            what = f"has {len(parts)} splits"
        fix = f"name one of them, {parts[0]}" if parts else "write it again"
        raise ConfigError.of(str(folder), what, fix, subject="data")
    return parts[0]


def _read_object(path: Path) -> Mapping[str, object]:
    """The JSON object in a small file; an empty one if the file has none."""
    if not path.is_file():
        return {}
    value = parse("".join(line for _, line in read_lines(path, "make it readable")))
    return value if isinstance(value, dict) else {}
