"""One engine with a KV cache of so many blocks, stepped by hand and looked into after each step.

Knows nothing about what is compared. Run as a process of its own, as an engine has to be:
`python -m benchmarks.capacity.engine` reads an `Ask` as JSON and prints a `Seen`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.load.plain import Plain

if TYPE_CHECKING:
    from vllm import LLM

BLOCK = 32
"""Tokens of a block."""


class Ask(Plain):
    """What is served and asked: `requests` different pictures, all at once."""

    model: str
    side: int
    """Of the square pictures, pixels."""
    blocks: int
    """Of the KV cache; vLLM keeps one of them to itself."""
    requests: int
    output_tokens: int
    state: str | None = None
    budget: int | None = None


class Seen(Plain):
    """What one engine did."""

    prompt_tokens: int
    """Of every request; they are alike."""
    blocks_each: int
    """That one request alone holds in its last step."""
    at_once: int
    """The most requests that ran in one step."""
    blocks_at_most: int
    """That were in use after a step."""
    preempted: int
    answered: int


def look(ask: Ask) -> Seen:
    """Serve one request alone, then all at once."""
    from vllm import LLM

    settings = {"state": ask.state, "budget": ask.budget}
    llm = LLM(
        model=ask.model,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=4096,
        num_gpu_blocks_override=ask.blocks,
        max_num_seqs=256,
        # All requests that fit are to be let in before the first one ends.
        max_num_batched_tokens=32768,
        enable_prefix_caching=False,
        disable_log_stats=False,  # or preemptions are not counted
        additional_config={} if ask.state is None else {"autoprune": settings},
    )
    lengths, alone = _drive(llm, ask, range(1))
    more, together = _drive(llm, ask, range(1, 1 + ask.requests))
    lengths |= more
    if len(lengths) != 1:
        raise RuntimeError(f"prompts were to be of one length, and are {sorted(lengths)}")
    return Seen(
        prompt_tokens=lengths.pop(),
        blocks_each=max(used for _, used in alone),
        at_once=max(running for running, _ in together),
        blocks_at_most=max(used for _, used in together),
        preempted=_preemptions(llm),
        answered=ask.requests,
    )


def _drive(llm: LLM, ask: Ask, numbers: range) -> tuple[set[int], list[tuple[int, int]]]:
    """Lengths of the prompts, and after every step: requests that run, blocks in use."""
    from vllm import SamplingParams

    from benchmarks.load.pictures import picture

    sampling = SamplingParams(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True)
    for number in numbers:
        prompt = {
            "prompt": f"USER: <image>\nw{number} ASSISTANT:",
            "multi_modal_data": {"image": picture(number, ask.side, ask.side)},
        }
        llm.llm_engine.add_request(str(number), prompt, sampling)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    idle = pool.get_num_free_blocks()
    lengths: set[int] = set()
    seen: list[tuple[int, int]] = []
    ended = 0
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        # Blocks of requests that end in this step are given back within it.
        seen.append((len(scheduler.running), idle - pool.get_num_free_blocks()))
        for output in outputs:
            if output.finished:
                ended += 1
                lengths.add(len(output.prompt_token_ids or ()))
    if ended != len(numbers):
        raise RuntimeError(f"{ended} of {len(numbers)} requests were answered")
    return lengths, seen


def _preemptions(llm: LLM) -> int:
    """How many times a request had to give its blocks back."""
    found = [one for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    return sum(int(one.value) for one in found)


def main() -> None:
    """Read what is asked, print what was seen, as the last line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or the scheduler is out of sight
    print(look(Ask.model_validate_json(Path(sys.argv[1]).read_text())).model_dump_json())


if __name__ == "__main__":
    main()
