"""``python -m benchmarks.pooling {minillava,miniqwen}``: how far pruning moves pooled vectors.

A small model as an embedding model (last token): mean cosine, over the first question about each
of 100 pictures, between the vectors with all N visual tokens and with K of them.
"""

from __future__ import annotations

import sys
from statistics import fmean
from typing import Any

from torch import Tensor, cosine_similarity, tensor

from benchmarks.minillava import split as llava
from benchmarks.minillava import vocabulary as llava_words
from benchmarks.miniqwen import split as qwen
from benchmarks.miniqwen import vocabulary as qwen_words

PICTURES = 100
DIVISORS = (2, 4, 8)


def main(model: str) -> None:
    """Print a table: rows are the shipped state and a random keep."""
    from vllm import LLM

    small = model == "miniqwen"
    examples = (qwen if small else llava).draw_examples("test", PICTURES)
    first = list({example.image_id: example for example in reversed(examples)}.values())
    words = qwen_words if small else llava_words
    engine: Any = LLM(
        model=str(qwen.CHECKPOINT if small else llava.LLAVA),
        runner="pooling",
        convert="embed",
        enforce_eager=True,
        max_model_len=1024,
        additional_config={"autoprune": {"state": "autoprune", "requests": "budget"}},
    )

    def embed(divisor: int = 0, **fields: object) -> Tensor:
        """Vectors ``(B, D)`` with N over the divisor tokens, or with all."""
        prompts = []
        for example in first:
            size = qwen.image_size(example.image).tokens if small else 144
            entry = {"budget": size // divisor, **fields} if divisor else {"enabled": False}
            prompts.append(
                {
                    "prompt": words.prompt(example.question),
                    "multi_modal_data": {"image": qwen.convert_image(example.image)},
                    "mm_processor_kwargs": {"autoprune": entry},
                }
            )
        outputs = engine.embed(prompts, use_tqdm=False)
        return tensor([output.outputs.embedding for output in outputs])

    whole = embed()
    print("| kept | " + " | ".join(f"K = N/{divisor}" for divisor in DIVISORS) + " |")
    for label, fields in (("autoprune", {}), ("random", {"keep": "random"})):
        means = (fmean(cosine_similarity(whole, embed(d, **fields)).tolist()) for d in DIVISORS)
        print(f"| {label} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    others = fmean(cosine_similarity(whole, whole.roll(1, 0)).tolist())
    print(f"two different pictures, all tokens: {others:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
