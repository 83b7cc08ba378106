"""Inputs of the self-test: pictures, a video, questions about them, and the served state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from PIL import Image

from vllm_autoprune.selftest.run import SPLIT_QUESTION
from vllm_autoprune.tpdsl.loading import load_state


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Draw a picture of coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


def video(count: int, seed: int = 0) -> tuple[Any, dict[str, object]]:
    """Frames ``(count, 84, 56, 3)`` of a video, and vLLM's metadata of a sampled video."""
    frames = [numpy.asarray(picture(56, 84, seed + index)) for index in range(count)]
    metadata = {
        "fps": 2.0,
        "duration": count / 2,
        "total_num_frames": count,
        "frames_indices": [*range(count)],
        "do_sample_frames": False,
        "video_backend": "opencv",
    }
    return numpy.stack(frames), metadata


Question = tuple[str, Sequence[Image.Image]]
"""A text and the images that it is about."""

COLOUR = "what colour is the cat"
COUNT = "how many are there"
PLACE = "which dog is on the left"

_WIDE = picture(200, 112, 1)
_TALL = picture(96, 208, 2)
LARGE = picture(330, 300, 4)

QUESTIONS: Mapping[str, Question] = {
    "square": (COLOUR, [picture(112, 112, 0)]),
    "wide": (COLOUR, [_WIDE]),
    "tall": (COLOUR, [_TALL]),
    SPLIT_QUESTION: (COLOUR, [LARGE]),
    "two": (COUNT, [_TALL, picture(120, 96, 3)]),
    "other question": (PLACE, [_WIDE]),
}
_PAGE = Image.new("RGB", (330, 300), "white")
_PAGE.paste(picture(120, 80, 5), (90, 70))  # blank around it
PAGE_QUESTION: Question = (COLOUR, [_PAGE])

PADDING = " and the sky is blue on the right" * 6
"""Added to every question, so that image and text fill a block of the prefix cache."""

LARGE_BUDGET = 4096
"""A K above N of every image here, as the limit of what requests may ask for."""

VIDEO_BUDGET = "tokens_per_frame:2"
"""K of the video; each of its frames has 6 tokens."""


def make_settings(budget: int, **fields: object) -> dict[str, Any]:
    """Settings of a server: CDPruner refined by signals that read question and attention.

    Nothing is merged, because checks find tokens by their rows. The signals of ``autoprune``, which
    read means and norms, are nearly equal for tokens of a random model, and the two model runners
    round them differently. ``fields`` are further fields of the state.
    """
    weights = {
        "instruction_guided_visual_relevance": 0.4,
        "attention_proxy_saliency": 0.2,
        "spatial_centrality_prior": 0.1,
        "redundancy_density_penalty": 0.2,
        "local_contrast_saliency": 0.1,
    }
    state = {
        **load_state("autoprune").model_dump(mode="json"),
        "scoring": {
            "signals": [
                {"atom": atom, "weight": weight} for atom, weight in weights.items()
            ],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_product_fusion"},
        },
        "constraints": {
            "pool": [
                {"atom": "quality_pool_builder"},
                {"atom": "diversity_pool_builder", "pool_ratio": 0.5},
            ],
            "selector": {"atom": "reference_residual_exchange_selector"},
        },
        "reassembly": {"atom": "mean_residual"},
        "frames": {"tokens": {"atom": "fixed_budget@640"}, "budget": "curvature"},
        "positions": "true",
        **fields,
    }
    return {"state": state, "budget": budget, "requests": "budget"}
