"""Samples that lmms-eval logged."""

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
    usual_rule,
)


@data_set(
    "doc_id doc target arguments filtered_resps doc_hash",
    others="input input_media resps category",
)
def read_lmms_sample(record: Record) -> AskedQuestion:
    """The question of a logged sample; raises :class:`ConfigError` if its picture was not kept."""
    fields = record.fields
    arguments = fields.get("arguments")
    prompts = [fields.get("input")]
    if isinstance(arguments, list):
        prompts += arguments
    text = next((prompt for prompt in prompts if isinstance(prompt, str)), None)
    image = fields.get("input_media")
    if not image:
        what = (
            "has no picture: lmms-eval keeps only those that have a path or an address"
        )
        fix = "give the data of the task itself, such as VLMEvalKit's TSV of it"
        raise ConfigError.of(record.where, what, fix, subject="data")
    target = fields["target"]
    category = fields.get("category")
    asked = {"image": image, "question": text, "answer": target, "category": category}
    return make_question(record, asked, usual_rule(target))
