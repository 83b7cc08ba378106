"""Codec of records as rows of bytes, which travel from an API server to its workers.

vLLM batches, hashes, caches and sends such a row in the same way as pixels.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

Record = TypeVar("Record")


class RowCodec(Generic[Record]):
    """Encodes records of one type, a dataclass whose fields have bounds, as rows ``(L,)`` uint8.

    A row is a byte with the format's version, followed by the record. A record has exactly one
    valid row; other rows that would decode to it are refused.
    """

    def __init__(self, record: type[Record], version: int, longest: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(record)
        self._version = version
        self._longest = longest

    def encode(self, record: Record) -> Tensor:
        """The row of a record; its bounds are not checked."""
        text = bytearray((self._version,)) + self._encoder.encode(record)
        return torch.frombuffer(text, dtype=torch.uint8)

    def decode(self, row: object) -> Record:
        """Inverse of :meth:`encode`; raises :class:`ValueError` for any other input.

        The row has to be on the CPU.
        """
        if not isinstance(row, Tensor) or row.dtype != torch.uint8 or row.dim() != 1:
            raise ValueError("is not a row of bytes")
        if row.device.type != "cpu" or not 1 < len(row) <= self._longest:
            raise ValueError(f"has {len(row)} bytes on {row.device.type}")
        text = row.numpy().tobytes()
        if text[0] != self._version:
            raise ValueError(f"has format version {text[0]}, and not {self._version}")
        try:
            record = self._decoder.decode(text[1:])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"cannot be read: {error}") from None
        if not torch.equal(self.encode(record), row):
            raise ValueError("has other bytes than it is encoded by")
        return record
