"""What is and is not supported, in one table from which the README's is made.

Knows nothing about how: each row says where it was seen, or that nobody has looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["yes", "refused", "no", "untested"]


@dataclass(frozen=True, slots=True)
class Support:
    """One thing people ask about."""

    feature: str
    status: Status
    note: str


SUPPORT: tuple[Support, ...] = (
    Support("LLaVA-1.5 (`LlavaForConditionalGeneration`, CLIP tower)", "yes", "all tests"),
    Support("LLaVA with a SigLIP or Pixtral tower", "refused", "no [CLS] token to read"),
    Support("LLaVA-NeXT, Qwen-VL and other architectures", "refused", "at start-up, with a reason"),
    Support("`/v1/chat/completions`, `LLM.chat`, `LLM.generate`", "yes", "one identity for all"),
    Support("Several images, several turns", "yes", "instruction of the turn with the image"),
    Support("Prefix caching, multi-modal caches", "yes", "image + state + K + instruction"),
    Support("Chunked prefill", "yes", "same tokens as whole prefill"),
    Support("Budget of one request", "yes", "server needs `--trust-request-mm-kwargs`"),
    Support("`--api-server-count` above 1", "yes", "both processes seen answering"),
    Support("Tensor parallelism", "yes", "TP = 2 on a CPU; ranks choose the same tokens"),
    Support("`image_embeds` inputs", "no", "served unpruned: they come without signals"),
    Support("Rust front end", "refused", "it bypasses Python processors"),
    Support("vLLM 0.32 on CPU, model runner V1", "yes", "what the tests run on"),
    Support("vLLM 0.33; GPUs; model runner V2; CUDA graphs", "untested", "nobody has run it yet"),
    Support("LoRA on the vision tower or projector", "refused", "features are kept by image"),
    Support("Sleep mode with a text tower", "untested", "its weights are not vLLM's to reload"),
    Support(
        "Pipeline parallelism, LoRA on the language model, speculative decoding",
        "untested",
        "nobody has run it yet",
    ),
)


def as_markdown() -> str:
    """The table as the README shows it."""
    lines = ["| | supported | |", "|---|---|---|"]
    lines += [f"| {row.feature} | {row.status} | {row.note} |" for row in SUPPORT]
    return "\n".join(lines) + "\n"
