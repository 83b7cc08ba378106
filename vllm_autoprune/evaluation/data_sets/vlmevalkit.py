"""Rows of VLMEvalKit's tables."""

from string import ascii_uppercase

from vllm_autoprune.evaluation.asked_question import AskedQuestion, render
from vllm_autoprune.evaluation.data_sets.registry import Record, data_set, make_known
from vllm_autoprune.evaluation.data_sets.vqa import SHORT
from vllm_autoprune.evaluation.pictures import PictureSource


@data_set("index")
def read_vlmevalkit(record: Record) -> AskedQuestion:
    """A row whose options are columns named by letters."""
    fields = record.fields
    text = fields.get("question", "")
    answer = fields.get("answer")
    options = {name: fields[name] for name in ascii_uppercase if name in fields}
    accepted: tuple[str, ...] = ()
    if options:
        hint = f"Hint: {fields['hint']}\n" if "hint" in fields else ""
        choices = "".join(f"{name}. {option}\n" for name, option in options.items())
        text = f"{hint}Question: {text}\nOptions:\n{choices}"
        text += "Please select the correct answer from the options above. \n"
        if answer in [*options]:
            accepted = (answer, options[answer])
    elif isinstance(answer, list):
        text = f"{text}{SHORT}"
    question = make_known(
        record,
        accepted,
        image=fields.get("image", fields.get("image_path", fields.get("video"))),
        question=text,
        answer=answer,
        category=fields.get("category"),
    )
    sources = list[PictureSource]()
    render(question.turns, sources.append)
    record.pictures.rows[str(fields["index"])] = sources
    return question
