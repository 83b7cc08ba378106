"""Wordings of every kind of question: those used in training, and unseen paraphrases for testing.

Slots: name, a_name, digit, colour, plural, side, number, relation.
"""

from __future__ import annotations

from benchmarks.minillava.layout import COLOURS, SHAPES, SIGN

SEEN: dict[str, tuple[str, ...]] = {
    "digit": (
        "What digit is on the {name}?",
        "Which digit does the {name} carry?",
        "Read the digit on the {name}.",
        "What is written on the {name}?",
        "Name the digit of the {name}.",
        "Look at the {name}. What digit is on it?",
        "On the {name}, which digit is written?",
        "The {name} has which digit on it?",
        "Can the digit on the {name} be read? Name it.",
    ),
    "colour": (
        "What colour is the shape with the digit {digit}?",
        "Which colour has the shape that carries the digit {digit}?",
        "Name the colour of the shape with the digit {digit}.",
        "Look for the digit {digit}. Which colour has its shape?",
        "The shape with the digit {digit} has which colour?",
        "Of which colour is the shape that carries the digit {digit}?",
        "The digit {digit}: on which colour is it?",
        "Which colour is under the digit {digit}?",
    ),
    "shape": (
        "What shape carries the digit {digit}?",
        "Which shape has the digit {digit}?",
        "Name the shape with the digit {digit}.",
        "Look for the digit {digit}. What shape is it on?",
        "The digit {digit} is carried by which shape?",
        "The digit {digit}: on which shape is it?",
        "Of the shapes, which has the digit {digit} on it?",
    ),
    "text": (
        "What number is on the {name}?",
        "Read the number on the {name}.",
        "Which number does the {name} show?",
        "Look at the {name}. Which number is on it?",
        "On the {name}, what number is written?",
        "The {name} has which number on it?",
        "Which number can be read on the {name}?",
    ),
    "count": (
        "How many {plural} are there?",
        "Count the {plural} in the picture.",
        "How many {plural} does the picture show?",
        "Look for {plural}. How many are there?",
        "Of {plural}, how many are in the picture?",
        "Count all {plural} that can be seen.",
        "The picture shows how many {plural}?",
        "Name the number of {plural}.",
        "What number of {plural} does the picture show?",
    ),
    "quarter": (
        "In which quarter of the picture is the {name}?",
        "Which quarter of the picture holds the {name}?",
        "Name the quarter that the {name} is in.",
        "Look for the {name}. In which quarter is it?",
        "Where is the {name}? Name the quarter.",
        "The {name}: which quarter is it in?",
    ),
    "relation": (
        "What digit is on the shape {relation} the {name}?",
        "Which digit does the shape {relation} the {name} carry?",
        "Read the digit {relation} the {name}.",
        "Which digit is {relation} the {name}?",
        "Look at the {name}. What digit is on the shape {relation} it?",
        "The shape {relation} the {name} carries which digit?",
    ),
    "existence": (
        "Is there {a_name} in the picture?",
        "Does the picture show {a_name}?",
        "Can {a_name} be seen?",
        "Look for {a_name}. Is it there?",
        "Is {a_name} there?",
        "Can the picture be said to show {a_name}?",
    ),
    "reading": (
        "Does the {name} carry the digit {digit}?",
        "Is the digit on the {name} a {digit}?",
        "Is there the digit {digit} on the {name}?",
        "Look at the {name}. Is its digit a {digit}?",
        "Is {digit} the digit on the {name}?",
        "Does the {name} have the digit {digit} on it?",
        "Is a {digit} written on the {name}?",
        "Can the digit {digit} be read on the {name}?",
        "The {name}: is its digit a {digit}?",
    ),
    "position": (
        "Is the {name} in the {side} half of the picture?",
        "Does the {side} half of the picture hold the {name}?",
        "Is the {name} in the {side} half?",
        "Look for the {name}. Is it in the {side} half?",
        "Is the {side} half where the {name} is?",
        "The {name}: is it in the {side} half?",
    ),
    "counting": (
        "Are there exactly {number} {plural}?",
        "Does the picture show exactly {number} {plural}?",
        "Are there {number} {plural} in the picture?",
        "Is {number} the number of {plural}?",
        "Can {number} {plural} be counted, no more and no less?",
        "Does the picture have exactly {number} {plural}?",
        "Of {plural}, are there exactly {number}?",
    ),
}

# Paraphrases in the words of training, put together in a new way.
UNSEEN: dict[str, tuple[str, ...]] = {
    "digit": ("The {name} carries which digit?", "Name the digit that is on the {name}."),
    "colour": ("The digit {digit} is on a shape of which colour?",),
    "shape": ("On which shape is the digit {digit}?", "The digit {digit} is on what shape?"),
    "text": ("Name the number that the {name} shows.", "The {name} carries what number?"),
    "count": ("What is the number of {plural}?", "How many {plural} can be seen?"),
    "quarter": ("The {name} is in which quarter?",),
    "relation": ("Name the digit on the shape that is {relation} the {name}.",),
    "existence": ("Does the picture have {a_name}?", "Is {a_name} in the picture?"),
    "reading": ("Does the {name} show the digit {digit}?",),
    "position": ("Can the {name} be seen in the {side} half?",),
    "counting": ("Can exactly {number} {plural} be seen?",),
}

# The same questions in as few words as possible; the language model learns these first.
BRIEF: dict[str, tuple[str, ...]] = {
    "digit": ("{name}",),
    "colour": ("colour digit {digit}",),
    "shape": ("shape digit {digit}",),
    "text": ("{name}",),
    "count": ("{plural}",),
    "quarter": ("quarter {name}",),
    "relation": ("{relation} the {name}",),
    "existence": ("{a_name}",),
    # The name never comes first, because a name followed by a digit is an answered `digit` phrase.
    "reading": ("{digit} on the {name}", "the {name} a {digit}"),
    "position": ("{side} half {name}",),
    "counting": ("{number} {plural}",),
}

OPEN_KINDS = ("digit", "colour", "shape", "text", "count", "quarter", "relation")
PAIR_KINDS = ("existence", "reading", "position", "counting")
KINDS = OPEN_KINDS + PAIR_KINDS

CATEGORIES: dict[str, tuple[str, ...]] = {
    "attributes": ("digit", "colour", "shape"),
    "existence": ("existence",),
    "reading": ("reading",),
    "position": ("position", "quarter"),
    "counting": ("count", "counting"),
    "two-hop": ("relation",),
    "fine text": ("text",),
}
"""Kinds that are reported together, as in MME; every kind is in exactly one category."""

RELATIONS = ("left of", "right of", "above", "below")
"""Where the shape that is asked about lies, seen from the shape that is named."""
SIDES = ("left", "right", "upper", "lower")
MAX_COUNT = 5
"""The largest number that is ever asked for."""


def with_article(name: str) -> str:
    """The name with its indefinite article: "a red square", "an orange circle"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def name_plural(colour: int | None, shape: int | None) -> str:
    """The name of all shapes of a colour or of a form: "red shapes", "crosses"."""
    if shape is not None:
        return SHAPES[shape] + ("es" if SHAPES[shape].endswith("s") else "s")
    assert colour is not None
    return f"{COLOURS[colour]} shapes"


def tokenizer_texts() -> list[str]:
    """Sentences that contain every wording and every word for its slots."""
    names = [f"{colour} {shape}" for colour in COLOURS for shape in (*SHAPES, SIGN)]
    plurals = [name_plural(colour, None) for colour in range(len(COLOURS))]
    plurals += [name_plural(None, shape) for shape in range(len(SHAPES))]
    texts: list[str] = []
    for kind in KINDS:
        for wording in (*SEEN[kind], *UNSEEN[kind]):
            for number, name in enumerate(names):
                slots = {
                    "name": name,
                    "a_name": with_article(name),
                    "digit": str(number % 10),
                    "number": str(number % (MAX_COUNT + 1)),
                    "plural": plurals[number % len(plurals)],
                    "side": SIDES[number % len(SIDES)],
                    "relation": RELATIONS[number % len(RELATIONS)],
                }
                texts.append(wording.format(**slots))
    return sorted(set(texts))


def answer_words() -> list[str]:
    """Every word that occurs in answers; numbers are single digits put together."""
    return [*COLOURS, *SHAPES, "yes", "no", *SIDES, *map(str, range(10))]
