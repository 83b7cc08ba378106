"""Accuracy of a text that a model wrote, by the rule of the data that the question is from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Rule = Literal["text", "vqa", "yes_no", "choice"]
"""How a text is compared with the accepted answers: as text but for case, spaces and a full stop,
as VQAv2's scorer does with ten answers, by its first word, or by the letter or text of an option.
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
    if rule == "vqa":
        # The mean over the sets of nine answers, of which three that agree are enough.
        normalised = _normalise_vqa(text)
        matches = [_normalise_vqa(answer) == normalised for answer in answers]
        scores = [min((sum(matches) - match) / 3, 1.0) for match in matches]
        return sum(scores) / len(scores)
    words = re.findall(r"\w+", text)
    if rule == "yes_no":
        return float(words[:1] != [] and words[0].lower() == answers[0].strip().lower())
    matches_text = _normalise_text(text) in map(_normalise_text, answers)
    if rule == "choice" and not matches_text:
        letters = {word for word in words if re.fullmatch("[A-Z]", word)}
        if len(words) == 1 and len(words[0]) == 1:
            letters = {words[0].upper()}
        # "A" in a sentence may be the article.
        if len(letters) == 1 and (letters != {"A"} or len(words) <= 3):
            return float(letters == {answers[0]})
    return float(matches_text)


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
