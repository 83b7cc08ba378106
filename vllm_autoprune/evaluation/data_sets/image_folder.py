"""Questions in the metadata of an ImageFolder of ``datasets``."""

from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    make_own,
)


@data_set("file_name question", others="answer answers category pair")
@data_set("file_names question", others="answer answers category pair")
def read_image_folder(record: Record) -> AskedQuestion:
    """A question in this project's columns, about the picture that ``file_name`` names."""
    names = ("file_name", "file_names")
    fields = {name: value for name, value in record.fields.items() if name not in names}
    image = record.fields.get("file_name") or record.fields.get("file_names")
    return make_own(record._replace(fields={**fields, "image": image}))
