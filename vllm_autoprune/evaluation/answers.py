"""Accuracy of a model's text, by the scoring rule of the data set that the question is from."""

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

``text`` ignores case, spaces and a full stop; ``vqa`` is VQAv2's rule with ten answers; ``yes_no``
reads the first word; ``choice`` accepts an option's letter or text; ``relaxed`` is ChartQA's,
``anls`` DocVQA's, ``contains`` and ``contains_formula`` are OCRBench's, ``mmmu`` is MMMU's;
``rounded`` rounds a number to the decimals of the answer, as MathVista does.
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
"""Contractions without apostrophe; to VQAv2's scorer, they equal those with one."""


def score_text(rule: Rule, answers: Sequence[str], text: str) -> float:
    """Accuracy of a text, 0 to 1; for a choice, ``answers`` are the option's letter and text."""
    return float(_RULES[rule](answers, text))


def _score_exact(answers: Sequence[str], text: str) -> bool:
    return _normalise_text(text) in map(_normalise_text, answers)


def _score_vqa(answers: Sequence[str], text: str) -> float:
    """VQAv2's accuracy: the mean of min(matches / 3, 1) over all sets with one answer left out."""
    normalised = _normalise_vqa(text)
    matches = [_normalise_vqa(answer) == normalised for answer in answers]
    scores = [min((sum(matches) - match) / 3, 1.0) for match in matches]
    return sum(scores) / len(scores)


def _score_yes_no(answers: Sequence[str], text: str) -> bool:
    words = re.findall(r"\w+", text)
    return words[:1] != [] and words[0].lower() == answers[0].strip().lower()


def _score_choice(answers: Sequence[str], text: str) -> bool:
    """Whether the text is that of the right option, or has its letter as the only option letter."""
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
    """ChartQA's relaxed accuracy: numbers may differ by 5 %, other answers only in case."""
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
    """The number in a text, which may have commas between thousands; None if there is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _score_anls(answers: Sequence[str], text: str) -> float:
    """DocVQA's normalised Levenshtein similarity to the nearest answer; 0 if it is below 0.5."""
    words = " ".join(text.lower().split())
    similarities = [
        _compute_similarity(" ".join(answer.lower().split()), words)
        for answer in answers
    ]
    best = max(similarities)
    return best if best >= 0.5 else 0.0


def _compute_similarity(answer: str, text: str) -> float:
    """1 minus the edit distance divided by the length of the longer text."""
    length = max(len(answer), len(text))
    if abs(len(answer) - len(text)) * 2 > length:  # the similarity is below 0.5
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
    """OCRBench's rule: the text contains an answer, whatever the case."""
    line = text.lower().strip().replace("\n", " ")
    return any(a.lower().strip().replace("\n", " ") in line for a in answers)


def _score_contains_formula(answers: Sequence[str], text: str) -> bool:
    """OCRBench's rule for formulas: the text contains an answer, whatever the spaces."""
    formula = "".join(text.split())
    return any("".join(answer.split()) in formula for answer in answers)


def _score_rounded(answers: Sequence[str], text: str) -> bool:
    """Whether the text's only number equals an answer once rounded to the answer's decimals."""
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
"""Key words after which MMMU's scorer looks for an answer; in the last sentence also after "="."""


def _score_mmmu(answers: Sequence[str], text: str) -> bool:
    """MMMU's rule for free answers: a key part of the text has the answer, or an equal number."""
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
    """Whether ``part`` contains the answer; a single letter has to stand beside a space."""
    if len(answer) == 1:
        return part == answer or f" {answer}" in part or f"{answer} " in part
    return answer in part


def _list_key_parts(text: str) -> list[str]:
    """For each sentence, the shortest end after a key word; the whole text if there is none."""
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
    """Normalise as VQAv2's scorer: no punctuation or articles, numbers up to ten as digits."""
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
