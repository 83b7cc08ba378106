"""Questions about charts and documents: ChartQA, DocVQA, InfographicVQA, OCRBench."""

from __future__ import annotations

from vllm_autoprune.evaluation.answers import Rule
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
)
from vllm_autoprune.evaluation.data_sets.vqa import SHORT

_SINGLE = "\nAnswer the question with a single word."
"""lmms-eval appends this to ChartQA's questions."""


@data_set("imgname query label", others="type image")
@data_set("image query label human_or_machine")
@data_set("type question answer image", when={"type": ("human_test", "augmented_test")})
def read_chartqa(record: Record) -> AskedQuestion:
    """A question of ChartQA, from its own JSON, or its authors' or others' form on the Hub."""
    fields = record.fields
    image = fields.get("image")
    if image is None and (name := fields.get("imgname")) is not None:
        image = record.existing(f"png/{name}") or name
    question = fields.get("question") or fields.get("query")
    asked = {
        "image": image,
        "question": question and f"{question}{_SINGLE}",
        "answer": fields.get("answer") or fields.get("label"),
        "category": fields.get("type"),
    }
    return make_question(record, asked, "relaxed")


@data_set(
    "questionId question docId ucsf_document_id",
    others="question_types image answers ucsf_document_page_no data_split",
)
@data_set(
    "questionId question image_url data_split",
    others="image image_local_name answers answer_type ocr ocr_output_file operation/reasoning",
)
def read_docvqa(record: Record) -> AskedQuestion:
    """A question of DocVQA or InfographicVQA."""
    fields = record.fields
    kinds = fields.get("question_types") or fields.get("answer_type")
    asked = {
        "image": fields.get("image") or fields.get("image_local_name"),
        "question": fields["question"] and f"{fields['question']}{SHORT}",
        "answer": fields.get("answers"),
        "category": kinds[0] if isinstance(kinds, list) and kinds else None,
    }
    return make_question(record, asked, "anls")


@data_set("dataset question question_type answer image")
@data_set("dataset_name question type answers image_path", others="id")
def read_ocrbench(record: Record) -> AskedQuestion:
    """A question of OCRBench; a reply is right if it contains an answer."""
    fields = record.fields
    source = fields.get("dataset") or fields.get("dataset_name")
    rule: Rule = "contains_formula" if source == "HME100k" else "contains"
    asked = {
        "image": fields.get("image") or fields.get("image_path"),
        "question": fields["question"],
        "answer": fields.get("answer") or fields.get("answers"),
        "category": fields.get("question_type") or fields.get("type"),
    }
    return make_question(record, asked, rule)
