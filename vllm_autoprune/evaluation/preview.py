"""Preview of an evaluation without a server: its cases, and the text of its first questions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import JsonValue

from vllm_autoprune.evaluation.asked_question import render
from vllm_autoprune.evaluation.pictures import Picture
from vllm_autoprune.evaluation.question_suite import QuestionSuite
from vllm_autoprune.evaluation.questions import PreparedQuestion

_SHOWN = 3
"""Number of questions that are shown as they will be asked."""


class Preview(NamedTuple):
    """The first questions of an evaluation, and its cases and requests."""

    record: dict[str, JsonValue]
    blocks: list[str]
    """The preview as paragraphs of text."""


def preview_questions(suite: QuestionSuite) -> Preview:
    """The preview of ``suite``, in which names and sizes stand for the content of pictures."""
    questions = suite.questions
    shown = questions[:_SHOWN]
    images = {picture.name for q in questions for picture in q.pictures}
    labelled = sum(bool(question.answers) for question in questions)
    cases = [case for case in suite.cases if not case.refused]
    refused = {case.name: case.refused for case in suite.cases if case.refused}
    record: dict[str, JsonValue] = {
        "data": suite.name,
        "questions": len(questions),
        "images": len(images),
        "with_answers": labelled,
        "cases": [case.name for case in cases],
        "refused": dict(refused),
        "requests": len(cases) * len(questions),
        "left_out": suite.left_out,
        "first": [_record_question(question) for question in shown],
    }
    summary = [
        f"{suite.name}: {len(questions):,} questions about {len(images):,} images, "
        f"{labelled:,} with an answer",
        f"cases: {', '.join(case.name for case in cases)}",
        *(f"not asked: {name}: {why}" for name, why in refused.items()),
        suite.plan(),
    ]
    if suite.left_out:
        summary.append(suite.setup.left_out_text)
    blocks = ["\n".join(summary)]
    blocks += ["\n".join(_describe_question(question)) for question in shown]
    return Preview(record, blocks)


def _record_picture(picture: Picture) -> dict[str, JsonValue]:
    width, height = picture.image().size
    record: dict[str, JsonValue] = {
        "type": "image",
        "name": picture.name,
        "width": width,
        "height": height,
    }
    if picture.is_video:
        record |= {"type": "video", "frames": picture.frames}
    return record


def _record_question(question: PreparedQuestion) -> dict[str, JsonValue]:
    messages: list[JsonValue] = []
    for message in render(question.turns, _record_picture):
        messages.append(dict(message))  # type: ignore[arg-type]  # it is JSON
    return {
        "where": question.where,
        "category": question.category,
        "messages": messages,
        "answers": list(question.answers),
        "rule": question.rule,
    }


def _describe_question(question: PreparedQuestion) -> Iterator[str]:
    """Lines with the place of a question, its messages, and its accepted answers."""
    yield f"{question.where}, category {question.category}"
    for message in render(question.turns, _record_picture):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            if "width" in part:
                frames = f", {part['frames']} frames" if "frames" in part else ""
                size = f"{part['width']} x {part['height']} pixels{frames}"
                text = f"[{part['type']} {part['name']}, {size}]"
            else:
                text = str(part.get("text"))
            yield f"  {message['role']}: {text}".replace("\n", "\n    ")
    answers = " | ".join(question.answers) or "none"
    yield f"  accepted ({question.rule}): {answers}"
