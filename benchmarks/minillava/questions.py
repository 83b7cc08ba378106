"""Questions about a scene: kinds, wordings, answers, evidence patches, yes/no pairs.

Knows nothing about pixels, tokenizers or models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.minillava.scenes import COLOURS, SHAPES, Scene, Thing

OPEN_KINDS: tuple[str, ...] = ("digit", "colour", "shape")
PAIR_KINDS: tuple[str, ...] = ("existence", "reading")
# Tried and not learnt by a model of this size: a small share of training, never in the headline.
UNLEARNT_KINDS: tuple[str, ...] = ("count", "position")
LEARNT_KINDS: tuple[str, ...] = OPEN_KINDS + PAIR_KINDS

WORDINGS: dict[str, tuple[str, ...]] = {
    "digit": (
        "What digit is on the {name}?",
        "Which digit does the {name} carry?",
        "Read the digit on the {name}.",
    ),
    "colour": (
        "What colour is the shape with the digit {digit}?",
        "Which colour has the object that carries the digit {digit}?",
    ),
    "shape": (
        "What shape carries the digit {digit}?",
        "Which shape is the object with the digit {digit}?",
    ),
    "existence": (
        "Is there {a_name} in the picture?",
        "Does the picture show {a_name}?",
    ),
    "reading": (
        "Does the {name} carry the digit {digit}?",
        "Is the digit on the {name} a {digit}?",
    ),
    "count": (
        "How many {colour} shapes are there?",
        "How many of the shapes are {colour}?",
    ),
    "position": (
        "Is the {name} in the {side} half of the picture?",
        "Does the {name} lie in the {side} half?",
    ),
}


@dataclass(frozen=True)
class Question:
    """One question: `evidence` are raster patches, `phrase` names what the eye looks for."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]
    phrase: str


def a(name: str) -> str:
    """The name with its indefinite article."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _word(rng: random.Random, kind: str, **slots: str | int) -> str:
    return rng.choice(WORDINGS[kind]).format(**slots)


def ask_open(rng: random.Random, kind: str, thing: Thing) -> Question:
    """One open question of an `OPEN_KINDS` kind about a thing."""
    text = _word(rng, kind, name=thing.name, digit=thing.digit)
    answers = {"digit": str(thing.digit), "colour": COLOURS[thing.colour]}
    answer = answers.get(kind, SHAPES[thing.shape])
    phrase = thing.name if kind == "digit" else f"digit {thing.digit}"
    return Question(kind, text, answer, thing.patches, phrase)


def _absent(rng: random.Random, scene: Scene) -> str:
    """A name that no thing in the scene bears, made of words that some things bear."""
    taken = {(thing.colour, thing.shape) for thing in scene.things}
    colours = sorted({thing.colour for thing in scene.things})
    shapes = sorted({thing.shape for thing in scene.things})
    near = [(c, s) for c in colours for s in shapes if (c, s) not in taken]
    if not near or rng.random() < 0.2:
        every = [(c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES))]
        near = [pair for pair in every if pair not in taken]
    colour, shape = rng.choice(near)
    return f"{COLOURS[colour]} {SHAPES[shape]}"


def ask_pair(
    rng: random.Random, kind: str, scene: Scene, thing: Thing
) -> tuple[Question, Question]:
    """The yes and the no question of one pair, both about the same scene."""
    name, seen = thing.name, thing.patches
    if kind == "existence":
        missing = _absent(rng, scene)
        yes = Question(kind, _word(rng, kind, a_name=a(name)), "yes", seen, name)
        return yes, Question(kind, _word(rng, kind, a_name=a(missing)), "no", (), missing)
    if kind == "reading":
        shown = [other.digit for other in scene.things if other is not thing]
        every = [digit for digit in range(10) if digit != thing.digit]
        wrong = rng.choice(shown if rng.random() < 0.5 else every)
        yes = Question(kind, _word(rng, kind, name=name, digit=thing.digit), "yes", seen, name)
        return yes, Question(kind, _word(rng, kind, name=name, digit=wrong), "no", seen, name)
    if kind == "position":
        row, column = thing.cell // 4, thing.cell % 4
        vertical = rng.random() < 0.5
        true, false = ("left", "right") if column < 2 else ("right", "left")
        if vertical:
            true, false = ("upper", "lower") if row < 2 else ("lower", "upper")
        yes = Question(kind, _word(rng, kind, name=name, side=true), "yes", seen, name)
        return yes, Question(kind, _word(rng, kind, name=name, side=false), "no", seen, name)
    raise ValueError(f"{kind!r} is not asked in pairs; pairs are existence, reading, position")


def ask_count(rng: random.Random, scene: Scene, colour: int) -> Question:
    """How many things of a colour; the evidence is every patch of all of them."""
    found = [thing for thing in scene.things if thing.colour == colour]
    evidence = tuple(sorted(patch for thing in found for patch in thing.patches))
    text = _word(rng, "count", colour=COLOURS[colour])
    return Question("count", text, str(len(found)), evidence, COLOURS[colour])


def training_questions(
    rng: random.Random, scene: Scene, things: Sequence[Thing], number: int, extras: bool
) -> list[Question]:
    """`number` questions about some of a scene's things; `extras` lets unlearnt kinds in."""
    asked: list[Question] = []
    while len(asked) < number:
        thing = rng.choice(things)
        dice = rng.random()
        if extras and dice < 0.05:
            asked.append(ask_count(rng, scene, thing.colour))
        elif extras and dice < 0.1:
            asked.append(rng.choice(ask_pair(rng, "position", scene, thing)))
        elif dice < 0.65:
            asked.append(ask_open(rng, rng.choice(OPEN_KINDS), thing))
        else:
            asked.append(rng.choice(ask_pair(rng, rng.choice(PAIR_KINDS), scene, thing)))
    return asked


def pointing_text(rng: random.Random, scene: Scene, thing: Thing) -> str:
    """A phrase or a full question whose evidence is exactly this thing's patches."""
    dice = rng.random()
    if dice < 0.15:
        return rng.choice((thing.name, a(thing.name), f"the {thing.name}"))
    if dice < 0.3:
        return rng.choice((f"digit {thing.digit}", f"the shape with the digit {thing.digit}"))
    if dice < 0.65:
        return ask_open(rng, rng.choice(OPEN_KINDS), thing).text
    if dice < 0.95:
        kind = rng.choice(PAIR_KINDS)
        yes, no = ask_pair(rng, kind, scene, thing)
        return no.text if kind == "reading" and rng.random() < 0.5 else yes.text
    return ask_pair(rng, "position", scene, thing)[0].text


def caption(rng: random.Random, scene: Scene) -> str:
    """Three things of the scene in words, for the contrast between images."""
    things = rng.sample(scene.things, 3)
    return ", ".join(f"{thing.name} {thing.digit}" for thing in things)


def every_text() -> list[str]:
    """Every sentence that the wordings can make, for tokenizer training and its tests."""
    names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    texts: list[str] = []
    for kind in sorted(WORDINGS):
        for wording in WORDINGS[kind]:
            for number, name in enumerate(names):
                for side in ("left", "right", "upper", "lower"):
                    slots = {"name": name, "a_name": a(name), "digit": str(number % 10)}
                    colour = name.split()[0]
                    texts.append(wording.format(**slots, colour=colour, side=side))
    return sorted(set(texts))
