"""Cells of a picture that hold nothing new, found in its pixels before a vision tower encodes them.

A cell is the square of patches that becomes one token. It is predicted from its neighbours as in
PixelPrune (arXiv:2604.00886, which published no code). With A to the left, B above and C above to
the left, the prediction is B if A is like C and B is not, and A otherwise. Or it is predicted from
the cell at its place in the picture before, as in a sequence of screenshots.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from typing import Literal

import numpy
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.registry import StatePart

VERSION = 1
"""Version of the rules that drop cells: part of every cache identity."""

_SAMPLE = 256
"""Stride of the pixels that are compared first: few cells of a photograph agree in all of them."""

Anchors = NDArray[numpy.int32]
"""``(N,)``: for each cell of a grid in raster order, the index of the kept cell that stands for it:
the cell itself or an earlier one."""

Digests = NDArray[numpy.uint8]
"""``(H, W, 16)``: digests of the pixels of a picture's cells."""


CELLS_FIX = (
    'give "flat", "predicted", "changed", "changed+flat", "none", or "flat:2" with a '
    "tolerance up to 32"
)


class Cells(StatePart):
    """Extension: drop cells of a picture before the vision tower, and count K of the others.

    ``flat`` drops a cell of one colour that its neighbours predict: margins, and the background
    between lines. ``predicted`` drops every cell that its neighbours predict, and so also content
    that repeats: of aligned check boxes it keeps one. ``changed`` drops a cell that is equal to the
    one at its place in the image before, if both images have the same size; ``changed+flat`` drops
    flat cells of an image that has none of its size before it, or has changed too much.
    """

    rule: Literal["flat", "predicted", "changed", "changed+flat"] = Field(
        default="flat", description="which predicted cells go"
    )
    tolerance: int = Field(
        default=0,
        ge=0,
        le=32,
        description="grey levels by which pixels that are alike may differ; above 0 faint marks "
        "go; an image is compared with the one before without it",
    )
    most: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="a picture of which a larger share would be left is encoded whole",
    )

    @classmethod
    def parse(cls, value: object, where: str) -> Cells | None:
        """Parse a rule, which may have a tolerance as in ``flat:2``, or an object.

        ``none`` gives None. Raises :class:`StateError`.
        """
        if isinstance(value, Cells):
            return value
        fields: object = value
        if isinstance(value, str):
            if value == "none":
                return None
            match = re.fullmatch(
                r"(?!changed:)([\w+]+)(?::(\d{1,3}))?", value, re.ASCII
            )
            fields = match and {"rule": match[1], "tolerance": int(match[2] or 0)}
        try:
            return cls.model_validate(fields)
        except ValidationError:
            what = f"{str(value)[:40]!r} is no rule for cells"
            raise StateError.of(where, what, CELLS_FIX, subject="cells") from None

    def __str__(self) -> str:
        return f"{self.rule}:{self.tolerance}" if self.tolerance else self.rule

    @property
    def compares(self) -> bool:
        """Whether images are compared with the image before."""
        return self.rule in ("changed", "changed+flat")

    def find_anchors(
        self,
        cells: NDArray[numpy.uint8],
        unchanged: NDArray[numpy.bool] | None = None,
    ) -> Anchors | None:
        """Anchors of the cells ``(H, W, patches, channels, pixels)`` of a picture.

        ``unchanged`` ``(N,)`` says which cells the image before has at the same place; None if it
        is not compared. Returns None if the picture should be encoded whole. The first cell is
        always kept. A cell is compared with the anchor of a neighbour instead of the neighbour
        itself, so that a chain of small changes along a gradient does not drop cells that differ
        much from their anchor. The anchor of an unchanged cell is the last kept cell before it.
        """
        height, width = cells.shape[:2]
        count = height * width
        if unchanged is not None:
            kept = numpy.where(unchanged, 0, numpy.arange(count, dtype=numpy.int32))
            anchors: Anchors = numpy.maximum.accumulate(kept)
            if len(kept_cells(anchors)) <= self.most * count:
                return anchors
        if self.rule == "changed":
            return None
        cells = cells.reshape(count, *cells.shape[2:])
        contents = numpy.arange(count)
        if self.tolerance == 0:
            contents = _number_contents(cells)
            if contents.max() + 1 > self.most * count:
                return None
        droppable = numpy.ones(count, dtype=bool)
        if self.rule != "predicted":
            droppable = self._find_droppable(cells, contents)
        if count - droppable.sum() > self.most * count:
            return None
        anchors = self._predict(cells, contents, droppable, (height, width))
        return None if len(kept_cells(anchors)) > self.most * count else anchors

    def _find_droppable(
        self, cells: NDArray[numpy.uint8], contents: NDArray[numpy.intp]
    ) -> NDArray[numpy.bool]:
        """Which cells have one colour; without a tolerance, false for contents that occur once.

        Without a tolerance, a content that occurs once is never equal to its prediction.
        """
        _, examples, counts = numpy.unique(
            contents, return_index=True, return_counts=True
        )
        candidates = numpy.flatnonzero((counts > 1) | (self.tolerance > 0))
        flat = numpy.zeros(len(examples), dtype=bool)
        flat[candidates] = self._find_flat(cells, examples[candidates])
        droppable: NDArray[numpy.bool] = flat[contents]
        return droppable

    def _predict(
        self,
        cells: NDArray[numpy.uint8],
        contents: NDArray[numpy.intp],
        droppable: NDArray[numpy.bool],
        size: tuple[int, int],
    ) -> Anchors:
        """Anchors if every droppable cell that is like its prediction is dropped."""
        height, width = size
        rows = cells.reshape(len(cells), -1)

        def alike(some: Anchors, more: Anchors) -> NDArray[numpy.bool]:
            if not self.tolerance:
                equal: NDArray[numpy.bool] = contents[some] == contents[more]
                return equal
            difference = rows[some].astype(numpy.int16) - rows[more]
            near: NDArray[numpy.bool] = (
                numpy.abs(difference).max(axis=1) <= self.tolerance
            )
            return near

        anchors = numpy.arange(len(cells), dtype=numpy.int32)
        diagonal = numpy.add.outer(numpy.arange(height), numpy.arange(width)).ravel()
        steps = [diagonal > 0]
        if self.tolerance:
            # Each diagonal depends on the anchors of the diagonal before it. Without a tolerance a
            # cell equals its neighbour's anchor too, so all cells are decided at once.
            steps = [diagonal == step for step in range(1, height + width - 1)]
        for ready in steps:
            index = numpy.flatnonzero(ready & droppable).astype(numpy.int32)
            y, x = numpy.divmod(index, width)
            beside = numpy.where(x == 0, anchors[index - width], anchors[index - 1])
            above = numpy.where(y == 0, anchors[index - 1], anchors[index - width])
            corner = anchors[index - width - 1]
            corner = numpy.where((x == 0) | (y == 0), beside, corner)
            predicted = numpy.where(
                alike(beside, corner) & ~alike(above, corner), above, beside
            )
            dropped = alike(index, predicted)
            anchors[index[dropped]] = predicted[dropped]
        while (anchors[anchors] != anchors).any():
            anchors = anchors[anchors]
        return anchors

    def _find_flat(
        self, cells: NDArray[numpy.uint8], some: NDArray[numpy.intp]
    ) -> NDArray[numpy.bool]:
        """Which of the cells ``some``, of ``(N, patches, channels, pixels)``, have one colour."""
        flat = numpy.ones(len(some), dtype=bool)
        for step in (_SAMPLE, 1):
            pixels = cells[..., ::step][some[flat]]
            spread = pixels.max(axis=(1, 3)) - pixels.min(axis=(1, 3))
            flat[flat] = (spread <= self.tolerance).all(axis=1)
        return flat


def _number_contents(cells: NDArray[numpy.uint8]) -> NDArray[numpy.intp]:
    """A number ``(N,)`` for the content of each cell, the same for equal cells, counted from 0.

    Hashing all bytes takes longest. So a cell is not hashed if no other cell has the same sample,
    or if it is equal to the first cell with its sample.
    """
    samples = [
        sample.tobytes() for sample in numpy.ascontiguousarray(cells[..., ::_SAMPLE])
    ]
    counts = Counter(samples)
    numbers = dict[bytes, int]()
    examples = dict[bytes, bytes]()
    contents = numpy.empty(len(cells), dtype=numpy.intp)
    for cell, sample in enumerate(samples):
        key = sample
        if counts[sample] > 1:
            content = cells[cell].tobytes()
            if examples.setdefault(sample, content) != content:
                key = content
        contents[cell] = numbers.setdefault(key, len(numbers))
    return contents


def kept_cells(anchors: Anchors) -> NDArray[numpy.intp]:
    """The cells that stand for themselves, in raster order ``(M,)``."""
    return numpy.flatnonzero(anchors == numpy.arange(len(anchors)))


def digest_cells(cells: NDArray[numpy.uint8]) -> Digests:
    """Digests of the cells ``(H, W, ...)`` of a picture."""
    height, width = cells.shape[:2]
    contents = cells.reshape(height * width, -1)
    digests = [blake2b(cell.tobytes(), digest_size=16).digest() for cell in contents]
    return numpy.frombuffer(b"".join(digests), numpy.uint8).reshape(height, width, 16)
