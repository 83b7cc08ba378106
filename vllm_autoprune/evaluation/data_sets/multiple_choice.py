"""Questions with options about pictures: one's own, and those of published data sets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.answers import Rule
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.options import (
    DIRECTLY,
    ask_options,
    find_letter,
    read_options,
)
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    find_own_fields,
    list_texts,
    make_own,
    make_question,
)
from vllm_autoprune.evaluation.data_sets.vqa import SHORT
from vllm_autoprune.evaluation.tables import read_list


@data_set("question options", without="choices")
@data_set("question choices", without="options")
def read_own_options(record: Record) -> AskedQuestion:
    """A question of this project's form with options.

    The answer is the letter, the text, or the number (from 0) of an option.
    """
    column = "options" if "options" in record.fields else "choices"
    if record.fields[column] is None:
        return make_own(record)
    options = read_options(record, column)
    other_fields = {n: value for n, value in record.fields.items() if n != column}
    fields = find_own_fields(record._replace(fields=other_fields))
    answers = [
        text
        for name in ("answer", "answers")
        for text in list_texts(fields.pop(name, None))
    ]
    if len(answers) > 1:
        what = f"has {len(answers)} answers, and options"
        fix = "give one, or leave the options out"
        raise ConfigError.of(record.where, what, fix, subject="data")
    answer = answers[0] if answers else None
    letter = find_letter(record, options, answer, "letter", "text", "number")
    return ask_options(record, options, letter, fields)


@data_set(
    "question_id question choices difficult_direct_answer",
    others="image image_id correct_choice_idx direct_answers rationales split",
)
def read_aokvqa(record: Record) -> AskedQuestion:
    """A multiple-choice question of A-OKVQA; its pictures are files named by COCO's numbers."""
    fields = record.fields
    options = read_options(record, "choices")
    letter = find_letter(record, options, fields.get("correct_choice_idx"), "number")
    image = fields.get("image")
    if image is None:
        number = f"{fields.get('image_id', ''):0>12}"
        names = [f"{year}{split}/{number}.jpg" for year, split in _COCO]
        image = record.existing(f"{number}.jpg", *names) or f"{number}.jpg"
    return ask_options(record, options, letter, {**_question(fields), "image": image})


_COCO = (("val", "2017"), ("train", "2017"), ("test", "2017"))


def _question(fields: Mapping[str, object]) -> dict[str, object]:
    return {"question": fields["question"]}


@data_set(
    "question choices answer hint task grade subject topic category skill lecture solution",
    others="image split id",
)
def read_scienceqa(record: Record) -> AskedQuestion | str:
    """A question of ScienceQA; in its own JSON the picture is the file ``SPLIT/ID/image.png``."""
    fields = record.fields
    if (image := fields.get("image")) is None:
        return "without a picture"
    if image == "image.png":
        folder = f"{fields.get('id')}/{image}"
        image = record.existing(f"{fields.get('split')}/{folder}", folder) or image
    options = read_options(record, "choices")
    context = f"Context: {fields['hint']}\n" if fields["hint"] else ""
    letter = find_letter(record, options, fields["answer"], "number")
    asked = {**_question(fields), "image": image, "category": fields["subject"]}
    prompt = f"{context}{{question}}\n{{options}}\n{DIRECTLY}"
    return ask_options(record, options, letter, asked, prompt)


@data_set(
    "question choice_a choice_b choice_c choice_d question_id question_type_id data_id data_type",
    others="image answer segment",
)
def read_seedbench(record: Record) -> AskedQuestion:
    """A question of SEED-Bench, whose pictures are named by ``data_id``."""
    fields = record.fields
    options = [str(fields[f"choice_{letter}"]) for letter in "abcd"]
    name = str(fields["data_id"])
    image = fields.get("image") or record.existing(f"SEED-Bench-image/{name}") or name
    letter = find_letter(record, options, fields.get("answer"), "letter")
    category = f"type {fields['question_type_id']}"
    asked = {**_question(fields), "image": image, "category": category}
    return ask_options(record, options, letter, asked)


@data_set(
    "id question options answer question_type subfield image_1",
    others="explanation img_type topic_difficulty image_2 image_3 image_4 image_5 image_6 image_7",
)
def read_mmmu(record: Record) -> AskedQuestion:
    """A question of MMMU about the pictures that it or its options name."""
    fields = record.fields
    numbers = re.findall(r"<image (\d)>", f"{fields['question']} {fields['options']}")
    images = [fields.get(f"image_{number}") for number in sorted(set(numbers) or "1")]
    subject = re.fullmatch(r"[^_]+_(.+)_\d+", str(fields["id"]))
    asked = {
        **_question(fields),
        "image": [image for image in images if image is not None],
        "category": subject[1] if subject else fields["subfield"],
    }
    if fields["question_type"] == "multiple-choice":
        options = read_options(record, "options")
        letter = find_letter(record, options, fields["answer"], "letter")
        prompt = f"{{question}}\n{{options}}\n\n{DIRECTLY}"
        return ask_options(record, options, letter, asked, prompt)
    answer = fields["answer"]
    accepted = read_list(answer) if isinstance(answer, str) else None
    asked["question"] = f"{fields['question']}\n{SHORT}"
    return make_question(record, {**asked, "answer": accepted or answer}, "mmmu")


_FORMS = {
    "integer": "Answer the question using a single integer number.",
    "float": "Answer the question using a single floating-point number with {} decimal places.",
    "list": "Answer the question using a Python list.",
}
"""Instruction that follows a free question of MathVista, by the type of its answer."""


@data_set(
    "pid question choices unit precision answer question_type answer_type metadata",
    others="image decoded_image query",
)
def read_mathvista(record: Record) -> AskedQuestion:
    """A question of MathVista, with an instruction to answer with a letter or a value alone."""
    fields = record.fields
    unit = f" (Unit: {fields['unit']})" if fields["unit"] else ""
    metadata = fields["metadata"]
    image = fields.get("decoded_image")
    asked: dict[str, object] = {
        "question": f"{fields['question']}{unit}",
        "image": fields.get("image") if image is None else image,
        "category": metadata.get("task") if isinstance(metadata, dict) else None,
    }
    if fields["question_type"] == "multi_choice":
        options = read_options(record, "choices")
        letter = find_letter(record, options, fields["answer"], "text")
        return ask_options(record, options, letter, asked)
    kind = str(fields["answer_type"])
    decimals = str(fields["precision"]).partition(".")[0]
    asked["question"] = f"{asked['question']}\n{_FORMS.get(kind, '').format(decimals)}"
    rule: Rule = "text" if kind == "list" else "rounded"
    return make_question(record, {**asked, "answer": fields["answer"]}, rule)
