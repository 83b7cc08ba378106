"""Top-k and top-p sampling without the interpreter."""

from __future__ import annotations


def sample_with_torch() -> None:
    """Let vLLM mask logits by torch, not by its Triton kernel (``_topk_topp_kernel``).

    The kernel converts the index of a loop; in the interpreter this index is a plain integer.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
