"""Cells of a picture that hold nothing new, found in its pixels before a vision tower encodes them.

A cell is the square of patches that becomes one token. It is predicted from its neighbours as by
PixelPrune (arXiv:2604.00886, without code of theirs): with A to the left, B above and C above to
the left, by B where A is like C and B is not, else by A.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import numpy
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.registry import StatePart

VERSION = 1
"""Of what the rules drop: part of every cache identity."""

_SAMPLE = 256
"""Distance of the pixels that are looked at first: few cells of a photograph are alike in them."""

Anchors = NDArray[numpy.int32]
"""``(N,)``: by cell of a grid in raster order, the kept one standing for it, itself or before."""


class Cells(StatePart):
    """Extension: cells of a picture that are dropped before the vision tower, K is of the others.

    ``flat`` drops a cell of one colour that its neighbours predict: margins, and the ground between
    lines. ``predicted`` drops any cell that they predict, and with it what repeats: of aligned
    check boxes it keeps one.
    """

    rule: Literal["flat", "predicted"] = Field(
        default="flat", description="which predicted cells go"
    )
    tolerance: int = Field(
        default=0,
        ge=0,
        le=32,
        description="grey levels by which pixels that are alike may differ; above 0 faint marks go",
    )
    most: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="a picture of which a larger share would be left is encoded whole",
    )

    @classmethod
    def parse(cls, value: object, where: str) -> Cells | None:
        """From ``flat``, ``predicted``, one with its tolerance as in ``flat:2``, or an object.

        ``none`` is None. Raises :class:`StateError`.
        """
        if isinstance(value, Cells):
            return value
        fields: object = value
        if isinstance(value, str):
            if value == "none":
                return None
            match = re.fullmatch(r"(\w+)(?::(\d{1,3}))?", value, re.ASCII)
            fields = match and {"rule": match[1], "tolerance": int(match[2] or 0)}
        try:
            return cls.model_validate(fields)
        except ValidationError:
            what = f"{str(value)[:40]!r} is no rule for cells"
            fix = 'give "flat", "predicted", "none", or "flat:2" with a tolerance up to 32'
            raise StateError("cells", [Problem(where, what, fix)]) from None

    def __str__(self) -> str:
        return f"{self.rule}:{self.tolerance}" if self.tolerance else self.rule

    def find_anchors(self, cells: NDArray[numpy.uint8]) -> Anchors | None:  # noqa: C901
        """Anchors of the cells ``(H, W, patches, channels, pixels)`` of a picture.

        None where it is to be encoded whole. The first cell is always kept. A cell within the
        tolerance is compared with its anchor, so that a slow gradient is not followed for long.
        """
        height, width = cells.shape[:2]
        count = height * width
        rows = cells.reshape(count, -1)
        cells = cells.reshape(count, *cells.shape[2:])
        droppable = numpy.ones(count, dtype=bool)
        equal = numpy.arange(count)
        if self.tolerance == 0:
            # Hashing all bytes takes longest: none of a cell whose sample no other has, or which is
            # that of an equal one.
            samples = [
                each.tobytes()
                for each in numpy.ascontiguousarray(cells[..., ::_SAMPLE])
            ]
            common = Counter(samples)
            number = dict[bytes, int]()
            heads = dict[bytes, bytes]()
            for cell, key in enumerate(samples):
                if common[key] > 1:
                    content = rows[cell].tobytes()
                    key = key if heads.setdefault(key, content) == content else content
                equal[cell] = number.setdefault(key, len(number))
            if len(number) > self.most * count:
                return None
        if self.rule == "flat":
            _, different, often = numpy.unique(
                equal, return_index=True, return_counts=True
            )
            some = different if self.tolerance else different[often > 1]
            flat = numpy.zeros(count, dtype=bool)
            flat[some] = self._find_flat(cells, some)
            droppable = flat[different[equal]]
        if count - droppable.sum() > self.most * count:
            return None

        def alike(
            some: NDArray[numpy.int32], others: NDArray[numpy.int32]
        ) -> NDArray[numpy.bool]:
            same: NDArray[numpy.bool] = equal[some] == equal[others]
            if self.tolerance:
                apart = rows[some].astype(numpy.int16) - rows[others]
                same = numpy.abs(apart).max(axis=1) <= self.tolerance
            return same

        anchors = numpy.arange(count, dtype=numpy.int32)
        # What is alike by its bytes is so to its anchor too; else a diagonal follows from the last.
        diagonal = numpy.add.outer(numpy.arange(height), numpy.arange(width)).ravel()
        steps = range(1, height + width - 1) if self.tolerance else ()
        for ready in (diagonal == step for step in steps) if steps else (diagonal > 0,):
            at = numpy.flatnonzero(ready & droppable).astype(numpy.int32)
            y, x = numpy.divmod(at, width)
            beside = anchors[at - 1]
            above = anchors[at - width]
            corner = anchors[at - width - 1]
            beside, above = (
                numpy.where(x == 0, above, beside),
                numpy.where(y == 0, beside, above),
            )
            corner = numpy.where((x == 0) | (y == 0), beside, corner)
            predicted = numpy.where(
                alike(beside, corner) & ~alike(above, corner), above, beside
            )
            dropped = alike(at, predicted)
            anchors[at[dropped]] = predicted[dropped]
        while (anchors[anchors] != anchors).any():
            anchors = anchors[anchors]
        return None if len(kept_cells(anchors)) > self.most * count else anchors

    def _find_flat(
        self, cells: NDArray[numpy.uint8], some: NDArray[numpy.intp]
    ) -> NDArray[numpy.bool]:
        """Which of some of the cells ``(N, patches, channels, pixels)`` have one colour."""
        flat = numpy.ones(len(some), dtype=bool)
        for step in (_SAMPLE, 1):
            pixels = cells[..., ::step][some[flat]]
            spread = pixels.max(axis=(1, 3)) - pixels.min(axis=(1, 3))
            flat[flat] = (spread <= self.tolerance).all(axis=1)
        return flat


def kept_cells(anchors: Anchors) -> NDArray[numpy.intp]:
    """The cells that stand for themselves, in raster order ``(M,)``."""
    return numpy.flatnonzero(anchors == numpy.arange(len(anchors)))
