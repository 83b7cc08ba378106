"""Keys of the workers' feature cache: a digest of an image's processed tensors.

Made where the tensors are made, on the CPU, and sent in the plan beside them: every rank has the
same key, and vLLM's caches hold both or neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.multimodal.hasher import MultiModalHasher

from vllm_autoprune.serving.shared.identities import make_feature_key
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan

if TYPE_CHECKING:
    from vllm.config.multimodal import MMHasherAlgorithm
    from vllm.multimodal.inputs import MultiModalKwargsItem


def add_feature_key(
    plan: ItemPlan, image: MultiModalKwargsItem, salt: str, algorithm: MMHasherAlgorithm
) -> ItemPlan:
    """Return the plan with the key of this image under the request's ``cache_salt``."""
    return replace(plan, key=make_feature_key(hash_pixels(image, algorithm), salt))


def hash_pixels(image: MultiModalKwargsItem, algorithm: MMHasherAlgorithm) -> str:
    """Digest of one processed image: every tensor that reaches the worker, with name and shape."""
    tensors = {name: part for name, part in image.get_data().items() if name != FIELD}
    return MultiModalHasher.hash_kwargs(algorithm, **tensors)
