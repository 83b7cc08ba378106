"""Rows of VLMEvalKit's tables."""

from string import ascii_uppercase

from vllm_autoprune.evaluation.asked_question import AskedQuestion, render
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_question,
    usual_rule,
)
from vllm_autoprune.evaluation.data_sets.vqa import SHORT
from vllm_autoprune.evaluation.pictures import PictureSource


@data_set(
    "index question",
    others=f"answer category hint image image_path video {' '.join(ascii_uppercase)}",
    without="answers images pair",
)
def read_vlmevalkit(record: Record) -> AskedQuestion:
    """The question of a row; its options are in columns named by their letters."""
    fields = record.fields
    answer = fields.get("answer")
    options = {
        name: fields[name]
        for name in ascii_uppercase
        if fields.get(name) not in (None, "", "nan")
    }
    text = fields["question"]
    accepted: tuple[str, ...] = ()
    if text is not None and options:
        hint = fields.get("hint")
        listed = "".join(f"{name}. {option}\n" for name, option in options.items())
        text = f"Question: {text}\nOptions:\n{listed}"
        text += "Please select the correct answer from the options above. \n"
        if hint not in (None, "", "nan"):
            text = f"Hint: {hint}\n{text}"
        if answer in [*options]:
            accepted = (answer, options[answer])
    elif text is not None and isinstance(answer, list):
        text = f"{text}{SHORT}"
    asked = {
        "image": fields.get("image") or fields.get("image_path"),
        "video": fields.get("video"),
        "question": text,
        "answer": answer,
        "category": fields.get("category"),
    }
    rule = "choice" if accepted else usual_rule(answer)
    question = make_question(record, asked, rule, accepted)
    sources = list[PictureSource]()
    render(question.turns, sources.append)
    record.file.rows[str(fields["index"])] = sources
    return question
