"""Questions of yes or no."""

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import Record, data_set, make_known


@data_set("text", without="question")
def read_pope(record: Record) -> AskedQuestion:
    """A question of POPE, or one of LLaVA's without an answer."""
    fields = record.fields
    return make_known(
        record,
        image=fields.get("image", fields.get("video")),
        question=fields["text"],
        answer=fields.get("label"),
        category=fields.get("category"),
    )
