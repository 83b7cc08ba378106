"""Requests of load tests: vLLM's ``custom_image``, and files of AIPerf and GenAI-Perf."""

from __future__ import annotations

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.conversations import read_turns
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
)


@data_set("prompt image_files", others="output_tokens")
def read_custom_image(record: Record) -> AskedQuestion:
    """A prompt of vLLM's ``custom_image`` about files."""
    fields = record.fields
    asked = {"image": fields["image_files"], "question": fields["prompt"]}
    return make_question(record, asked)


@data_set("content", others="output_tokens", without="role question image images")
def read_content(record: Record) -> AskedQuestion | str:
    """The parts of a user's message in vLLM's ``custom_image``."""
    message = {"role": "user", "content": record.fields["content"]}
    return read_turns(record, [message], "role", "content")


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
def read_single_turn(record: Record) -> AskedQuestion:
    """A request of AIPerf's ``single_turn`` or of GenAI-Perf; several texts are its lines."""
    fields = record.fields
    texts = fields.get("texts")
    text = "\n".join(map(str, texts)) if isinstance(texts, list) else fields.get("text")
    image = fields.get("image") or fields.get("images")
    return make_question(record, {"image": image, "question": text})


@data_set("turns", others="session_id")
def read_multi_turn(record: Record) -> str:
    """A conversation of AIPerf, whose later turns follow answers that no file has."""
    return "with turns that follow a server's answers"
