"""Questions that ten people answered: VQAv2, OK-VQA, TextVQA, VizWiz."""

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
    usual_rule,
)

SHORT = "\nAnswer the question using a single word or phrase."
"""lmms-eval and VLMEvalKit append this to questions with ten answers."""


@data_set(
    "image_id question_id question",
    others="answers answer_type question_type multiple_choice_answer subtype image image_classes "
    "set_name",
    without="answer choices",
)
@data_set(
    "image question answers answer_type",
    others="answerable question_id question_type",
    without="answer questionId",
)
def read_vqa(record: Record) -> AskedQuestion:
    """A question whose picture is given by ``image``, or by its number in COCO or TextVQA."""
    fields = record.fields
    asked = {
        "image": fields.get("image") or _find_numbered(record),
        "question": fields["question"] and f"{fields['question']}{SHORT}",
        "answer": fields.get("answers"),
        "category": fields.get("answer_type"),
    }
    return make_question(record, asked, usual_rule(fields.get("answers")))


def _find_numbered(record: Record) -> str:
    """File name of the picture with the number ``image_id``."""
    number = str(record.fields["image_id"])
    subtype = record.fields.get("subtype")
    coco = f"COCO_{subtype or ''}_{number:0>12}"
    names = [
        coco,
        f"{subtype}/{coco}",
        f"train_images/{number}",
        f"{number:0>12}",
        number,
    ]
    files = [f"{name}.jpg" for name in names]
    return record.existing(*files) or (files[0] if subtype else number)
