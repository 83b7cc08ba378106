"""Accuracy of a text that a model wrote, by the rule of the data that the question is from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Rule = Literal[
    "text",
    "vqa",
    "yes_no",
    "choice",
    "relaxed",
    "anls",
    "contains",
    "contains_formula",
    "mmmu",
    "rounded",
]
"""How a text is compared with the accepted answers.

As text but for case, spaces and a full stop; as VQAv2's scorer does with ten answers; by its first
word; by the letter or text of an option; as ChartQA, DocVQA, OCRBench (without spaces for its
formulas) and MMMU do; or as a number, rounded as MathVista's answers are.
"""

_NUMBERS = "zero one two three four five six seven eight nine ten"
_DIGITS = {"none": "0"} | {
    name: str(digit) for digit, name in enumerate(_NUMBERS.split())
}
_CONTRACTIONS = (
    " aint arent cant couldve couldnt couldntve didnt doesnt dont hadnt hadntve hasnt havent hed "
    "hedve hes howd howll hows isnt itd itdve itll maam mightnt mightntve mightve mustnt mustve "
    "neednt notve oclock oughtnt shant shedve shouldve shouldnt shouldntve somebodyd somebodydve "
    "somebodyll somebodys someoned someonedve someonell someones somethingd somethingdve "
    "somethingll thats thered theredve therere theres theyd theydve theyll theyre theyve twas "
    "wasnt wedve weve werent whatll whatre whats whatve whens whered wheres whereve whod whodve "
    "wholl whos whove whyll whyre whys wont wouldve wouldnt wouldntve yall yallll yalldve youd "
    "youdve youll youre youve "
)
"""Words that VQAv2's scorer takes for the same with and without apostrophes."""


def score_text(rule: Rule, answers: Sequence[str], text: str) -> float:
    """Accuracy of a text, 0 to 1; ``answers`` of a choice are the letter and its option."""
    return float(_RULES[rule](answers, text))


def _score_exact(answers: Sequence[str], text: str) -> bool:
    return _normalise_text(text) in map(_normalise_text, answers)


def _score_vqa(answers: Sequence[str], text: str) -> float:
    """The mean over the sets of all answers but one, of which three that agree are enough."""
    normalised = _normalise_vqa(text)
    matches = [_normalise_vqa(answer) == normalised for answer in answers]
    scores = [min((sum(matches) - match) / 3, 1.0) for match in matches]
    return sum(scores) / len(scores)


def _score_yes_no(answers: Sequence[str], text: str) -> bool:
    words = re.findall(r"\w+", text)
    return words[:1] != [] and words[0].lower() == answers[0].strip().lower()


def _score_choice(answers: Sequence[str], text: str) -> bool:
    """By the option's text, else by the only letter."""
    matches_text = _score_exact(answers, text)
    words = re.findall(r"\w+", text)
    if not matches_text:
        letters = {word for word in words if re.fullmatch("[A-Z]", word)}
        if len(words) == 1 and len(words[0]) == 1:
            letters = {words[0].upper()}
        # "A" in a sentence may be the article.
        if len(letters) == 1 and (letters != {"A"} or len(words) <= 3):
            return letters == {answers[0]}
    return matches_text


def _score_relaxed(answers: Sequence[str], text: str) -> bool:
    """ChartQA's relaxed accuracy: numbers within 5 %, other answers but for case."""
    return any(_is_near(answer.strip(), text.strip()) for answer in answers)


def _is_near(answer: str, text: str) -> bool:
    target = _read_percent(answer)
    number = _read_percent(text)
    if target and number is not None:
        return abs(number - target) <= 0.05 * abs(target)
    return answer.lower() == text.lower()


def _read_percent(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def _read_number(text: str) -> float | None:
    """A number, whose thousands may have commas between them."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _score_anls(answers: Sequence[str], text: str) -> float:
    """DocVQA's average normalised Levenshtein similarity of one text: 0 below one half."""
    words = " ".join(text.lower().split())
    similarities = [
        _compute_similarity(" ".join(answer.lower().split()), words)
        for answer in answers
    ]
    best = max(similarities)
    return best if best >= 0.5 else 0.0


def _compute_similarity(answer: str, text: str) -> float:
    """1 less the edit distance as a share of the longer text."""
    length = max(len(answer), len(text))
    if abs(len(answer) - len(text)) * 2 > length:  # below one half anyway
        return 0.0
    distances = [*range(len(answer) + 1)]
    for row, letter in enumerate(text, 1):
        previous = distances
        distances = [row]
        for column, expected in enumerate(answer, 1):
            replaced = previous[column - 1] + (letter != expected)
            distances.append(min(replaced, previous[column] + 1, distances[-1] + 1))
    return 1 - distances[-1] / length if length else 1.0


def _score_contains(answers: Sequence[str], text: str) -> bool:
    """OCRBench's: an answer is somewhere in the text, but for case."""
    line = text.lower().strip().replace("\n", " ")
    return any(a.lower().strip().replace("\n", " ") in line for a in answers)


def _score_contains_formula(answers: Sequence[str], text: str) -> bool:
    """OCRBench's for formulas: with case, but for spaces."""
    formula = "".join(text.split())
    return any("".join(answer.split()) in formula for answer in answers)


def _score_rounded(answers: Sequence[str], text: str) -> bool:
    """The text's only number, rounded to the decimals of the answer."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
    number = _read_number(numbers[0]) if len(numbers) == 1 else None
    for answer in answers:
        target = _read_number(answer)
        decimals = len(answer.strip().partition(".")[2])
        if None not in (number, target) and round(number or 0.0, decimals) == target:
            return True
    return _score_exact(answers, text)


_KEYS = (
    "could be ",
    "so ",
    "is ",
    "thus ",
    "therefore ",
    "final ",
    "answer ",
    "result ",
)
"""Behind which MMMU's scorer looks for the answer in a sentence; in the last one behind = too."""


def _score_mmmu(answers: Sequence[str], text: str) -> bool:
    """MMMU's for free answers: equal to a number of the text, or in a text that is the answer."""
    parts = _list_key_parts(text)
    numbers = [number for part in parts for number in _find_numbers(part)]
    numbers += [_read_number(part) for part in parts]
    rounded = {round(number, 2) for number in numbers if number is not None}
    for answer in answers:
        target = _read_number(answer.strip())
        if target is not None:
            if round(target, 2) in rounded:
                return True
        elif any(_is_inside(answer.strip().lower(), part) for part in parts):
            return True
    return False


def _is_inside(answer: str, part: str) -> bool:
    """Whether a text has the answer in it, a single letter only beside a space."""
    if len(answer) == 1:
        return part == answer or f" {answer}" in part or f"{answer} " in part
    return answer in part


def _list_key_parts(text: str) -> list[str]:
    """The shortest end of each sentence behind one of the key words, else the whole text."""
    text = text.strip().strip(".").lower()
    sentences = text.split("\n")
    parts = list[str]()
    for number, sentence in enumerate(sentences, 1):
        keys = (*_KEYS, "=") if number == len(sentences) else _KEYS
        ends = [sentence.split(key)[-1].strip() for key in keys if key in sentence]
        if ends and (shortest := min(ends, key=len)) not in ("", *":,.!?;'"):
            parts.append(shortest)
    return parts or [text]


def _find_numbers(text: str) -> list[float | None]:
    """Numbers of a text in all spellings that MMMU's scorer knows."""
    patterns = (
        r"-?\b\d{1,3}(?:,\d{3})+\b",
        r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
        r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
    )
    return [_read_number(n) for pattern in patterns for n in re.findall(pattern, text)]


def _normalise_text(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")


def _normalise_vqa(text: str) -> str:
    """As VQAv2's scorer: without punctuation and articles, digits for the words up to ten."""
    text = " ".join(text.split())
    grouped = re.search(r"\d,\d", text) is not None
    cleaned = text
    for mark in ';/[]"{}()=+\\_-><@`,?!':
        apart = grouped or f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if apart else " ")
    words = []
    for word in re.sub(r"\.(?!\d)", "", cleaned).lower().split():
        plain = word.replace("'", "")
        words.append(
            plain if f" {plain} " in _CONTRACTIONS else _DIGITS.get(word, word)
        )
    return " ".join(word for word in words if word not in ("a", "an", "the"))


_RULES: Mapping[Rule, Callable[[Sequence[str], str], float]] = {
    "text": _score_exact,
    "vqa": _score_vqa,
    "yes_no": _score_yes_no,
    "choice": _score_choice,
    "relaxed": _score_relaxed,
    "anls": _score_anls,
    "contains": _score_contains,
    "contains_formula": _score_contains_formula,
    "mmmu": _score_mmmu,
    "rounded": _score_rounded,
}
