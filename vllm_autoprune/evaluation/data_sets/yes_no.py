"""Questions of yes or no."""

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
    usual_rule,
)


@data_set("image text label", others="question_id category", without="question answer")
@data_set("question_id image text", others="category", without="question answer")
@data_set("question_id video text", others="category", without="question answer")
@data_set("question_id question answer image_source image category", others="id")
def read_pope(record: Record) -> AskedQuestion:
    """A question of POPE, from its own JSON or the Hub, or one of LLaVA's without an answer."""
    fields = record.fields
    question = fields.get("text") or fields.get("question")
    answer = fields.get("label") or fields.get("answer")
    media = {name: fields.get(name) for name in ("image", "video", "category")}
    asked = {**media, "question": question, "answer": answer}
    return make_question(record, asked, usual_rule(answer))
