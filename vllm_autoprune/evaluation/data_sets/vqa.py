"""Questions that ten people answered: VQAv2, OK-VQA, TextVQA, VizWiz."""

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import Record, data_set, make_known

SHORT = "\nAnswer the question using a single word or phrase."
"""Asked by lmms-eval and VLMEvalKit behind questions with ten answers."""


@data_set("image_id")
@data_set("answer_type")
def read_vqa(record: Record) -> AskedQuestion:
    """A question whose picture is named, or numbered as in COCO or TextVQA."""
    fields = record.fields
    number = str(fields.get("image_id", ""))
    subtype = fields.get("subtype")
    coco = f"COCO_{subtype or ''}_{number:0>12}"
    names = [
        coco,
        f"{subtype}/{coco}",
        f"train_images/{number}",
        f"{number:0>12}",
        number,
    ]
    if "image" in fields:
        names = [fields["image"]]
    files = [f"{name}.jpg" for name in names]
    existing = (
        file
        for file in files
        if any((folder / file).exists() for folder in record.pictures.folders)
    )
    return make_known(
        record,
        image=next(existing, files[0] if subtype else names[-1]),
        question=f"{fields.get('question', '')}{SHORT}",
        answer=fields.get("answers"),
        category=fields.get("answer_type"),
    )
