"""Questions with options about videos: EgoSchema, MLVU, Video-MME."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.options import (
    ask_options,
    find_letter,
    read_options,
)
from vllm_autoprune.evaluation.data_sets.registry import Record, data_set
from vllm_autoprune.evaluation.records import parse, read_lines


def _find_video(record: Record, name: object, *folders: str) -> str:
    """Path of the video ``name``, with or without its ending, directly or in one of ``folders``."""
    text = str(name)
    names = [text] if re.search(r"\.\w{3,4}$", text) else []
    names += [f"{text}{ending}" for ending in (".mp4", ".MP4", ".mkv")]
    paths = [f"{folder}{name}" for folder in ("", *folders) for name in names]
    return record.existing(*paths) or names[0]


@data_set(
    "video_id duration domain sub_category videoID question_id task_type question options answer",
    others="url",
)
def read_videomme(record: Record) -> AskedQuestion:
    """A question of Video-MME without subtitles, in its authors' prompt."""
    fields = record.fields
    options = read_options(record, "options")
    asked = {
        "question": fields["question"],
        "video": _find_video(record, fields["videoID"], "data/", "videos/"),
        "category": fields["task_type"],
    }
    prompt = (
        "Select the best answer to the following multiple-choice question based on the video. "
        "Respond with only the letter (A, B, C, or D) of the correct option.\n"
        "{question}\n{options}\nThe best answer is:"
    )
    letter = find_letter(record, options, fields["answer"], "letter")
    return ask_options(record, options, letter, asked, prompt)


_MLVU = {
    "plotQA": "1_plotQA",
    "needle": "2_needle",
    "findNeedle": "2_needle",
    "ego": "3_ego",
    "count": "4_count",
    "order": "5_order",
    "anomaly_reco": "6_anomaly_reco",
    "topic_reasoning": "7_topic_reasoning",
}
"""MLVU's folders of videos by task."""


@data_set("video duration question candidates question_type", others="answer")
@data_set(
    "video_name duration question candidates task_type", others="answer question_id"
)
def read_mlvu(record: Record) -> AskedQuestion:
    """A multiple-choice question of MLVU, from its own JSON or the Hub."""
    fields = record.fields
    options = read_options(record, "candidates")
    task = str(fields.get("question_type") or fields.get("task_type"))
    name = fields.get("video") or fields.get("video_name")
    folder = _MLVU.get(task, task)
    asked = {
        # On the Hub the question repeats the options.
        "question": re.split(r"\n\(A\)", str(fields["question"]))[0],
        "video": _find_video(record, name, f"video/{folder}/", f"{folder}/", "video/"),
        "category": task,
    }
    letter = find_letter(record, options, fields.get("answer"), "text", "letter")
    return ask_options(record, options, letter, asked)


@data_set("q_uid google_drive_id question")
def read_egoschema(record: Record) -> AskedQuestion:
    """A question of EgoSchema's own JSON; another file has the answers of its public subset."""
    fields = record.fields
    options = [
        str(fields[name])
        for name in map("option {}".format, range(5))
        if name in fields
    ]
    answers = (_read_answers(folder) for folder in record.file.folders)
    uid = str(fields["q_uid"])
    answer = next((found[uid] for found in answers if uid in found), None)
    return _ask_egoschema(record, uid, options, answer)


@data_set("question_idx question video_idx option answer")
def read_egoschema_hub(record: Record) -> AskedQuestion:
    """A question of EgoSchema on the Hub."""
    fields = record.fields
    options = read_options(record, "option")
    return _ask_egoschema(record, fields["video_idx"], options, fields["answer"])


def _ask_egoschema(
    record: Record, name: object, options: Sequence[str], answer: object
) -> AskedQuestion:
    video = _find_video(record, name, "videos/")
    asked = {"question": record.fields["question"], "video": video}
    letter = find_letter(record, options, answer, "number")
    return ask_options(record, options, letter, asked)


@lru_cache(maxsize=4)
def _read_answers(folder: Path) -> Mapping[str, object]:
    """Numbers of the right options by question, from ``subset_answers.json`` in ``folder``."""
    path = folder / "subset_answers.json"
    if not path.exists():
        return {}
    lines = read_lines(path, "make it readable")
    answers = parse("".join(line for _, line in lines))
    return answers if isinstance(answers, dict) else {}
