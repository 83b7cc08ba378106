"""Codec of the rows of bytes by which a record travels from an API server to its workers.

vLLM batches, hashes, caches and sends such a row as it does pixels.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

Record = TypeVar("Record")


class RowCodec(Generic[Record]):
    """Rows ``(L,)`` uint8 of records of one type, a dataclass whose fields have bounds.

    A row is a byte with the format's version, then the record, which has one row: whatever decodes
    to it otherwise is refused.
    """

    def __init__(self, record: type[Record], version: int, longest: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(record)
        self._version = version
        self._longest = longest

    def encode(self, record: Record) -> Tensor:
        """The row of a record, whose bounds are not checked."""
        text = bytearray((self._version,)) + self._encoder.encode(record)
        return torch.frombuffer(text, dtype=torch.uint8)

    def decode(self, row: object) -> Record:
        """Inverse of :meth:`encode`; raises :class:`ValueError` for any other input.

        The row has to lie on the CPU.
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
