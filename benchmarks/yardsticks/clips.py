"""Clips: shapes that stand still, move, change their digit, or come and go.

All frames have one background, and every shape has one shade, so that only what happens, and the
grain, differs from frame to frame.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from benchmarks.yardsticks.pages import Size
from benchmarks.yardsticks.scenes import COLOURS, SHAPES, Scene, Thing

SIZE = Size(6, 6)
"""Size of a frame: 36 visual tokens, four cells a side."""
FRAMES = (8, 16, 32)
UNSEEN_FRAMES = (12, 24)
"""Numbers of frames of a clip, and those that occur only in the test split."""
DIRECTIONS = ("right", "down", "left", "up")

Fact = tuple[Sequence[int], str, Mapping[str, str | int]]
"""A fact that a question asks for: its evidence, its answer, and the slots of its wording."""


@dataclass(frozen=True)
class Clip:
    """A scene for each frame, and the shapes that events happen to, as they are at first.

    ``digits`` are those of the board, in order. Visitors are in the order of their visits, which do
    not overlap.
    """

    frames: tuple[Scene, ...]
    mover: Thing
    direction: str
    board: Thing
    digits: tuple[int, ...]
    visitors: tuple[Thing, ...]
    stills: tuple[Thing, ...]

    @classmethod
    def draw(cls, rng: random.Random, frames: int, *, brief: bool = False) -> Clip:
        """Draw a clip of few colours and forms; if ``brief``, each visit lasts a single frame."""
        side, _ = SIZE.cells
        # The mover passes along a line of cells in which nothing else is placed.
        direction = rng.randrange(4)
        line = rng.randrange(side)
        path = [
            (line, column) if direction % 2 == 0 else (column, line)
            for column in range(side)
        ]
        path = path[::-1] if direction > 1 else path
        grid = product(range(side), range(side))
        cells = [cell for cell in grid if cell not in path]
        rng.shuffle(cells)
        colours = rng.sample(range(len(COLOURS)), rng.randint(3, 4))
        shapes = rng.sample(range(len(SHAPES)), rng.randint(3, 4))
        names = [(colour, shape) for colour in colours for shape in shapes]
        stills = rng.randint(1, 3)
        visitors = rng.randint(1, 4)
        count = min(2 + stills + visitors, len(names) - 1)
        things = Scene.place(rng, names, [path[0], *cells], count, (10.0, 13.5)).things
        mover, board, *extras = things
        guests = extras[:visitors]
        still = extras[visitors:]
        changes = sorted(rng.sample(range(1, 4), rng.randint(1, 2)))
        digits = [
            board.digit,
            *rng.sample(sorted({*range(10)} - {board.digit}), len(changes)),
        ]
        # A visit takes half to all of the visitor's slot of frames; frame 0 is in no slot.
        slot = (frames - 1) / len(guests)
        visits = list[range]()
        for number in range(len(guests)):
            start, end = (1 + round(slot * (number + part)) for part in (0, 1))
            length = rng.randint(max(1, (end - start + 1) // 2), max(1, end - start))
            length = 1 if brief else length
            begin = rng.randint(start, max(start, end - length))
            visits.append(range(begin, begin + length))
        scenes = []
        for frame in range(frames):
            row, column = path[frame * side // frames]
            digit = digits[sum(frame >= change * frames // 4 for change in changes)]
            there = [
                guest
                for guest, visit in zip(guests, visits, strict=True)
                if frame in visit
            ]
            moved = replace(mover, row=row, column=column)
            scenes.append(Scene((*still, replace(board, digit=digit), moved, *there)))
        word = DIRECTIONS[direction]
        return cls(
            tuple(scenes),
            mover,
            word,
            board,
            tuple(digits),
            tuple(guests),
            tuple(still),
        )

    def sample(self, count: int) -> Clip:
        """The clip of ``count`` frames, evenly spaced from the first to the last.

        Its digits and visitors are those that these frames show.
        """
        last = len(self.frames) - 1
        frames = [self.frames[number * last // (count - 1)] for number in range(count)]
        things = [thing for scene in frames for thing in scene.things]
        names = {thing.name for thing in things}
        digits = dict.fromkeys(
            thing.digit for thing in things if thing.name == self.board.name
        )
        visitors = tuple(guest for guest in self.visitors if guest.name in names)
        return replace(
            self, frames=tuple(frames), digits=tuple(digits), visitors=visitors
        )

    def render(self, seed: int, *, clean: bool = False) -> tuple[Tensor, Clip]:
        """Images (T, 3, H, W) uint8, and the clip with the visual tokens of all shapes."""
        images, scenes = SIZE.render_scenes(self.frames, seed, clean=clean, clip=True)
        return images, replace(self, frames=tuple(scenes))

    def _tokens(self, thing: Thing, frames: Sequence[int]) -> list[int]:
        """Tokens of a shape in the given frames, with its middle in every frame first."""
        ranked = list[tuple[int, int]]()
        for frame in frames:
            for other, tokens in self.frames[frame].patches.items():
                if other.name == thing.name:
                    start = frame * SIZE.tokens
                    ranked += [(rank, start + t) for rank, t in enumerate(tokens)]
        return [token for _, token in sorted(ranked)]

    def ask(self, kind: str, rng: random.Random) -> Fact:
        """Draw the fact that a question of this kind asks for."""
        every = range(len(self.frames))
        last = len(self.frames) - 1
        match kind:
            case "moves" | "where":
                answer = self.mover.name if kind == "moves" else self.direction
                return (
                    self._tokens(self.mover, (0, last)),
                    answer,
                    {"name": self.mover.name},
                )
            case "appears":
                when = rng.choice(("first", "last"))
                guest = self.visitors[0 if when == "first" else -1]
                return self._tokens(guest, every), guest.name, {"when": when}
            case "shows":
                when, index = rng.choice((("first", 0), ("last", -1)))
                tokens = self._tokens(self.board, (every[index],))
                return (
                    tokens,
                    str(self.digits[index]),
                    {"name": self.board.name, "when": when},
                )
            case "passes":
                tokens = [
                    token
                    for guest in self.visitors
                    for token in self._tokens(guest, every)
                ]
                return tokens, str(len(self.visitors)), {}
        thing = rng.choice(self.stills)
        return self._tokens(thing, (0,)), str(thing.digit), {"name": thing.name}
