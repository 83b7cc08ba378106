"""Tensors of a request's images, each of which is resized, trimmed and processed by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from PIL import Image
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.cells import TRIMMING, align_fields, trimmed_fields
from vllm_autoprune.serving.api.media import Size, can_prune
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.inputs import IMAGE_GRIDS, IMAGE_MARKS
from vllm_autoprune.serving.plan import ENTRY

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.cache import BaseMultiModalProcessorCache
    from vllm.multimodal.processing import BaseMultiModalProcessor as _Stock
    from vllm.multimodal.processing import BaseProcessingInfo

else:
    _Stock = object


@depends_on(
    "vllm.multimodal.processing:BaseMultiModalProcessor",
    "_apply_hf_processor_main",
    "_get_cache_missing_items",
    "_get_mm_fields_config",
)
@depends_on("vllm.multimodal.inputs:MultiModalKwargsItems", "from_hf_inputs")
@depends_on("vllm.multimodal.parse:MultiModalDataItems", "select")
class SeparateImages(_Stock):
    """Mixin for a stock multi-modal processor that processes every image by itself."""

    def _process_alone(
        self, picture: object, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        alone = MultiModalDataItems({"image": ImageProcessorItems([picture])})
        return super()._apply_hf_processor_main(alone, hf_kwargs)

    def _get_cache_missing_items(
        self,
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: MultiModalHashes,
    ) -> tuple[Mapping[str, list[bool]], MultiModalDataItems]:
        """As stock, but with the pictures instead of copies, because trimming finds them by id."""
        cached, missing = super()._get_cache_missing_items(
            cache, mm_data_items, mm_hashes
        )
        if TRIMMING.get() is None or "image" not in missing:
            return cached, missing
        images = zip(mm_data_items["image"].get_all(), cached["image"], strict=True)
        uncached = [image for image, is_cached in images if not is_cached]
        return cached, with_images(missing, uncached)

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """As stock, but each image is processed by itself.

        Hugging Face processors pad a batch to its largest image, so the tensors of an image would
        depend on the images beside it.
        """
        images = mm_items.get("image")
        trimming = TRIMMING.get()
        if images is None or not can_prune(mm_items):
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)
        if len(images) < 2 and trimming is None:
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)
        process: Callable[..., BatchFeature] = self._process_alone
        if trimming is not None:
            process = partial(trimming.process, process=process)
        tensors = [process(images.get(i), hf_kwargs) for i in range(len(images))]
        items = []
        for data in align_fields(tensors):
            fields = self._get_mm_fields_config(data, hf_kwargs)
            items += MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        joined = {
            name: element.field.reduce_data([item[name] for item in items])
            for name, element in items[0].items()
        }
        other_items = {
            name: items for name, items in mm_items.items() if name != "image"
        }
        if other_items:
            joined |= super()._apply_hf_processor_main(
                MultiModalDataItems(other_items), hf_kwargs
            )
        return BatchFeature(joined)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """As stock, with the number of pixel rows adapted to kept cells.

        What is known of an image beside its pixels stays on the CPU, where workers read it; vLLM
        moves that of Ovis to the device.
        """
        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        on_host = {
            name: MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            for name in (IMAGE_GRIDS, IMAGE_MARKS)
            if name in fields
        }
        return trimmed_fields({**fields, **on_host}, hf_inputs)


def with_images(
    items: Mapping[str, object], images: Sequence[object]
) -> MultiModalDataItems:
    """The items of a request with its images replaced by ``images``."""
    return MultiModalDataItems({**items, "image": ImageProcessorItems(images)})


def separate_images(inputs: ProcessorInputs) -> ProcessorInputs:
    """Inputs in which no picture is the same object twice, because trimming finds them by id."""
    if not can_prune(inputs.mm_data_items):
        return inputs
    items = inputs.mm_data_items["image"]
    images: list[object] = []
    seen = set[int]()
    is_repeated = False
    for picture, image in zip(items.get_all(), items.data, strict=True):
        is_seen = picture is not None and id(picture) in seen
        images.append(copy(picture) if is_seen else image)
        seen.add(id(picture))
        is_repeated |= is_seen
    if not is_repeated:
        return inputs
    return replace(inputs, mm_data_items=with_images(inputs.mm_data_items, images))


def resize_images(
    info: BaseProcessingInfo, inputs: ProcessorInputs, sizes: Sequence[Size | None]
) -> ProcessorInputs:
    """Inputs with the images resized to ``sizes``; None leaves an image as it is.

    Uses the processor's own interpolation. An image that was sent by its name is None.
    """
    if not any(sizes):
        return inputs
    items = inputs.mm_data_items["image"]
    images = []
    for i, size in enumerate(sizes):
        if size is None:
            images.append(items.data[i])
            continue
        image = items.get(i)
        if image is not None:
            if not isinstance(image, Image.Image):
                what = "can resize pictures, and this image is an array"
                raise RequestError.of(f"{ENTRY}/keep", what, "send it as a picture")
            resample = info.get_hf_processor().image_processor.resample
            image = image.convert("RGB").resize(size, Image.Resampling(int(resample)))
        images.append(image)
    return replace(inputs, mm_data_items=with_images(inputs.mm_data_items, images))
