"""Requests of load tests: vLLM's ``custom_image``, and files of AIPerf and GenAI-Perf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.conversations import read_turns
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
)


@data_set("prompt image_files", others="output_tokens")
def read_custom_image(record: Record) -> AskedQuestion:
    """A record of vLLM's ``custom_image``: a prompt about the pictures in ``image_files``."""
    fields = record.fields
    asked = {"image": fields["image_files"], "question": fields["prompt"]}
    return make_question(record, asked)


@data_set("content", others="output_tokens", without="role question image images")
def read_content(record: Record) -> AskedQuestion | str:
    """A record of vLLM's ``custom_image`` whose ``content`` has the parts of a user's message."""
    message = {"role": "user", "content": record.fields["content"]}
    return read_turns(record, [message])


@data_set(
    "text image", others="output_length extra", without="question answer answers label"
)
@data_set(
    "text images", others="output_length extra", without="question answer answers label"
)
@data_set(
    "texts images",
    others="output_length extra",
    without="question answer answers label",
)
def read_single_turn(record: Record) -> AskedQuestion | str:
    """A request of AIPerf's ``single_turn`` or of GenAI-Perf; several texts are joined as lines.

    The Cauldron has the same columns, with a question and its answer in each of the texts.
    """
    fields = record.fields
    text = fields.get("text")
    if isinstance(texts := fields.get("texts"), list):
        pairs = [text for text in texts if isinstance(text, dict) and "user" in text]
        if len(pairs) == len(texts):
            return _read_pairs(record, pairs)
        text = "\n".join(texts) if all(isinstance(t, str) for t in texts) else texts
    image = fields.get("image") or fields.get("images")
    return make_question(record, {"image": image, "question": text})


def _read_pairs(
    record: Record, pairs: Sequence[Mapping[str, object]]
) -> AskedQuestion | str:
    """The Cauldron's question-answer pairs as a conversation that ends with its last question."""
    turns = [
        {"role": role, "content": pair.get(role)}
        for pair in pairs
        for role in ("user", "assistant")
    ]
    return read_turns(record, turns)


@data_set("turns", others="session_id")
def read_multi_turn(record: Record) -> str:
    """The reason why conversations of AIPerf are left out: later turns need a server's answers."""
    return "with turns that follow a server's answers"
