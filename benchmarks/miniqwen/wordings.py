"""Wordings of questions about pages; those about scenes are mini-LLaVA's.

Slots: word, number, label, head, first, second. Words and numbers follow a space, so that they are
the same tokens in questions and answers.
"""

from __future__ import annotations

from benchmarks.minillava.wordings import BRIEF as SCENE_BRIEF
from benchmarks.minillava.wordings import SEEN as SCENE_SEEN
from benchmarks.minillava.wordings import UNSEEN as SCENE_UNSEEN

SCENE_KINDS = ("digit", "colour", "shape", "count", "quarter", "existence", "reading")
PAGE_KINDS = ("value", "word", "cell", "compare", "find")
PAIR_KINDS = frozenset({"existence", "reading", "find"})
KINDS = (*SCENE_KINDS, *PAGE_KINDS)
CATEGORIES: dict[str, tuple[str, ...]] = {"scenes": SCENE_KINDS, "pages": PAGE_KINDS}

_PAGE_SEEN: dict[str, tuple[str, ...]] = {
    "value": (
        "What number is next to {word}?",
        "Which number does the page give for {word}?",
        "Read the number next to {word}.",
        "Look for {word}. What number is next to it?",
        "The number of {word} is what?",
    ),
    "word": (
        "Which word has the number {number}?",
        "What word is next to {number}?",
        "Look for the number {number}. Which word is next to it?",
        "Name the word with the number {number}.",
        "The number {number} is next to which word?",
    ),
    "cell": (
        "What number is in row {label} under {head}?",
        "Which number does the table give for {label} and {head}?",
        "Read the number of {label} in column {head}.",
        "In column {head}, what is the number of {label}?",
        "Look at row {label}. What number is under {head}?",
    ),
    "compare": (
        "Which has the larger number, {first} or {second}?",
        "Of {first} and {second}, which has the larger number?",
        "Compare {first} and {second}. Which number is larger?",
        "Is the number of {first} or of {second} larger?",
    ),
    "find": (
        "Is the word {word} on the page?",
        "Does the page show {word}?",
        "Look for {word}. Is it there?",
        "Can {word} be read on the page?",
        "Is there a {word} on the page?",
    ),
}
_PAGE_UNSEEN: dict[str, tuple[str, ...]] = {
    "value": ("Name the number of {word}.",),
    "word": ("What word has {number} next to it?",),
    "cell": ("What number does the table give in row {label}, column {head}?",),
    "compare": ("Which number is larger, of {first} or of {second}?",),
    "find": ("Can the page be read to show {word}?",),
}
_PAGE_BRIEF: dict[str, tuple[str, ...]] = {
    "value": ("number {word}",),
    "word": ("word {number}",),
    "cell": ("row {label} under {head}",),
    "compare": ("larger {first} or {second}",),
    "find": ("there {word}",),
}

SEEN = {kind: SCENE_SEEN[kind] for kind in SCENE_KINDS} | _PAGE_SEEN
UNSEEN = {kind: SCENE_UNSEEN[kind] for kind in SCENE_KINDS} | _PAGE_UNSEEN
BRIEF = {kind: SCENE_BRIEF[kind] for kind in SCENE_KINDS} | _PAGE_BRIEF
