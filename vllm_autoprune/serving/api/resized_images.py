"""The resize control: images shrunk to at most K tokens before anything else sees them.

Where the number of tokens follows an image's size, the rival of pruning is a smaller image: what a
client has by shrinking its pictures, or an operator by ``max_pixels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

from vllm_autoprune.serving.api.pruning_choice import ImageChoice, Size
from vllm_autoprune.serving.api.request_fields import request_error
from vllm_autoprune.serving.shared.placeholders import Placeholders

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs


def choose_sizes(
    info: BaseProcessingInfo,
    placeholders: Placeholders,
    inputs: ProcessorInputs,
    sizes: Sequence[ImageSize | None],
    choices: Sequence[ImageChoice],
) -> tuple[ImageChoice, ...]:
    """The choices of a request, with a new size and K for each image that is to be resized.

    Raises :class:`RequestError` where the processor makes more than K tokens of any image.
    """
    resized = []
    for size, choice in zip(sizes, choices, strict=True):
        resizes = choice.keep == "resized" and not choice.keeps_all
        if not resizes or size is None or placeholders.resize is None:
            resized.append(choice)
            continue
        smaller = placeholders.resize(info, size, choice.kept)
        count = placeholders.count(info, smaller, inputs.hf_processor_mm_kwargs).tokens
        if count > choice.kept:
            what = f"K = {choice.kept}, and the image processor makes at least {count} tokens"
            fix = f"ask for {count} or more, or lower min_pixels in --mm-processor-kwargs"
            raise request_error("budget", what, fix)
        target = smaller.width, smaller.height
        # Two budgets may give one number of tokens, and then another size is another image.
        identity = f"{choice.identity}|{target}"
        resized.append(replace(choice, kept=count, resized=target, identity=identity))
    return tuple(resized)


def resize_images(
    info: BaseProcessingInfo, inputs: ProcessorInputs, sizes: Sequence[Size | None]
) -> ProcessorInputs:
    """Inputs with the images of these sizes; None leaves an image as it is."""
    if not any(sizes):
        return inputs
    items = inputs.mm_data_items["image"]
    images = [
        items.data[i] if size is None else _shrink(info, items.get(i), size)
        for i, size in enumerate(sizes)
    ]
    data = MultiModalDataItems({**inputs.mm_data_items, "image": ImageProcessorItems(images)})
    return replace(inputs, mm_data_items=data)


def _shrink(info: BaseProcessingInfo, image: object, size: Size) -> Image.Image | None:
    """The image at a size, with the processor's own interpolation; None for one sent by name."""
    if image is None:
        return None
    if not isinstance(image, Image.Image):
        what, fix = "can resize pictures, and this image is an array", "send it as a picture"
        raise request_error("keep", what, fix)
    method = Image.Resampling(int(info.get_hf_processor().image_processor.resample))
    return image.convert("RGB").resize(size, method)
