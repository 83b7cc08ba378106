"""Questions of yes or no: MME on the Hub, POPE."""

import hashlib

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
    usual_rule,
)


@data_set(
    "image text label",
    others="question_id image_id category",
    without="question answer",
)
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


@data_set("question_id image question answer category", when={"answer": ("Yes", "No")})
def read_mme(record: Record) -> AskedQuestion:
    """A question of MME on the Hub; both questions of a pair have the same ``question_id``."""
    digest = hashlib.sha256(str(record.fields["question_id"]).encode()).digest()
    columns = ("image", "question", "answer", "category")
    asked = {name: record.fields[name] for name in columns}
    pair = int.from_bytes(digest[:4])
    return make_question(record, {**asked, "pair": pair}, "yes_no")
