"""`python -m benchmarks.cost capacity`: concurrent requests in a KV cache of fixed size.

LLaVA-NeXT-7B's tokens (a square image of 672 pixels) on one narrow layer: blocks and requests are
counted in tokens, so that width and depth do not matter. Each engine runs in a process of its own,
``python -m benchmarks.cost.capacity SETTINGS``, is stepped by hand and inspected after each step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import StrictModel
from benchmarks.common.pictures import draw_picture
from benchmarks.common.report import Table
from benchmarks.common.shapes import write_llava_next
from benchmarks.server import run_engine
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.statistics import Verdict

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import LLM
    from vllm.inputs import TextPrompt as Prompt

BLOCK = 32
"""Tokens of a block."""

SIDE, BUDGET = 672, 320
BLOCKS, REQUESTS, OUTPUT_TOKENS = 931, 120, 12
PROMISE = 8.0
"""How many times as many requests the pruned engine has to hold."""


class EngineSettings(StrictModel):
    """What is served, and how many different pictures are sent at once."""

    model: str
    side: int
    """Of the square pictures, pixels."""
    blocks: int
    """Of the KV cache; vLLM reserves one of them."""
    requests: int
    output_tokens: int
    state: str | None = None
    budget: int | None = None


class EngineCounts(StrictModel):
    """Counts of one engine."""

    prompt_tokens: int
    """Of every request; all have the same length."""
    blocks_each: int
    """Blocks of a single request in its last step."""
    at_once: int
    """Highest number of requests running in one step."""
    blocks_at_most: int
    """Highest number of blocks in use after a step."""
    preempted: int
    answered: int


@dataclass(frozen=True)
class Comparison:
    """Counts of both engines, and the blocks predicted for the pruned one."""

    stock: EngineCounts
    pruned: EngineCounts
    predicted: int
    """Blocks of a pruned request, computed from its prompt length."""
    ratio: float
    """Concurrent requests, pruned over stock."""

    @property
    def saturated(self) -> bool:
        """Whether the pruned engine was sent more requests than it could run at once."""
        return self.pruned.at_once < self.pruned.answered

    @property
    def verdict(self) -> Verdict:
        """Whether blocks are as predicted and enough requests run at once.

        Inconclusive where every request ran at once: more could have run, and were not sent.
        """
        if self.pruned.blocks_each != self.predicted:
            return "does not hold"
        if self.ratio >= PROMISE:
            return "holds"
        return "does not hold" if self.saturated else "inconclusive"


def predicted_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Blocks of a request before its last token, which is never stored."""
    return -(-(prompt_tokens + output_tokens - 1) // BLOCK)


def compare(stock: EngineCounts, pruned: EngineCounts) -> Comparison:
    """Compare both engines."""
    predicted = predicted_blocks(pruned.prompt_tokens, OUTPUT_TOKENS)
    return Comparison(stock, pruned, predicted, pruned.at_once / stock.at_once)


def markdown(comparison: Comparison, blocks: int) -> str:
    """The table and the verdict."""
    rows = [
        (
            name,
            *map(str, (one.prompt_tokens, one.blocks_each, one.at_once, one.blocks_at_most)),
            str(one.preempted),
        )
        for name, one in (("stock", comparison.stock), (f"K = {BUDGET}", comparison.pruned))
    ]
    columns = (
        "", "prompt tokens", "blocks a request", "requests at once", "blocks in use", "preempted",
    )  # fmt: skip
    verdict: str = comparison.verdict
    if verdict == "inconclusive":
        verdict += (
            f" (too few requests: all {comparison.pruned.answered} ran at once; send more with "
            "--requests)"
        )
    return (
        f"KV cache of {blocks - 1} blocks of {BLOCK} tokens, answers of {OUTPUT_TOKENS} tokens, "
        f"{comparison.stock.answered} different images sent at once\n\n"
        f"{Table('', columns, rows, 'lrrrrr').markdown()}\n\n"
        f"{comparison.ratio:.1f} times as many requests at once; {comparison.predicted} blocks a "
        f"request predicted, {comparison.pruned.blocks_each} measured: {verdict}"
    )


def count_in_engine(settings: EngineSettings) -> EngineCounts:
    """Serve one request alone, then all at once."""
    from vllm import LLM

    pruning = {"state": settings.state, "budget": settings.budget}
    llm = LLM(
        model=settings.model,
        load_format="dummy",
        enforce_eager=True,
        dtype=choose_dtype(),
        block_size=BLOCK,
        max_model_len=4096,
        num_gpu_blocks_override=settings.blocks,
        max_num_seqs=256,
        # Large enough to admit all requests that fit before the first one ends.
        max_num_batched_tokens=32768,
        enable_prefix_caching=False,
        disable_log_stats=False,  # needed to count preemptions
        additional_config={} if settings.state is None else {"autoprune": pruning},
    )
    lengths, alone = _drive(llm, settings, range(1))
    more, together = _drive(llm, settings, range(1, 1 + settings.requests))
    lengths |= more
    if len(lengths) != 1:
        raise RuntimeError(f"prompts differ in length: {sorted(lengths)}")
    return EngineCounts(
        prompt_tokens=lengths.pop(),
        blocks_each=max(used for _, used in alone),
        at_once=max(running for running, _ in together),
        blocks_at_most=max(used for _, used in together),
        preempted=_preemptions(llm),
        answered=settings.requests,
    )


def _drive(
    llm: LLM, settings: EngineSettings, numbers: range
) -> tuple[set[int], list[tuple[int, int]]]:
    """Prompt lengths, and after every step the running requests and the blocks in use."""
    prompts = [
        build_prompt(draw_picture(number, settings.side, settings.side), f"w{number}")
        for number in numbers
    ]
    return step_through(llm, prompts, settings.output_tokens)


def build_prompt(picture: Image, question: str) -> Prompt:
    """A prompt of LLaVA's form, for an engine in this process."""
    prompt = f"USER: <image>\n{question} ASSISTANT:"
    return {"prompt": prompt, "multi_modal_data": {"image": picture}}


def step_through(
    llm: LLM, prompts: Sequence[Prompt], output_tokens: int
) -> tuple[set[int], list[tuple[int, int]]]:
    """Send all prompts at once; their lengths, and after every step requests and blocks in use."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), prompt, sampling)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    idle = pool.get_num_free_blocks()
    lengths: set[int] = set()
    steps: list[tuple[int, int]] = []
    finished = 0
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        # Requests that end in this step have freed their blocks already.
        steps.append((len(scheduler.running), idle - pool.get_num_free_blocks()))
        for output in outputs:
            if output.finished:
                finished += 1
                lengths.add(len(output.prompt_token_ids or ()))
    if finished != len(prompts):
        raise RuntimeError(f"{finished} of {len(prompts)} requests were answered")
    return lengths, steps


def _preemptions(llm: LLM) -> int:
    """How often a request was preempted."""
    metrics = [one for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    return sum(int(one.value) for one in metrics)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--out", type=Path, default=Path("out/capacity"), help="folder of files")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests sent at once")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """0: the promise holds; 1: it does not, or too few requests were sent to say."""
    folder = write_llava_next(options.out / "shape", layers=1, tower_layers=2, width=128)
    settings = EngineSettings(
        model=str(folder), side=SIDE, blocks=BLOCKS, requests=options.requests,
        output_tokens=OUTPUT_TOKENS,
    )  # fmt: skip
    pruning = {"state": "autoprune", "budget": BUDGET}
    stock = _run_engine(settings, options.out / "stock")
    pruned = _run_engine(settings.model_copy(update=pruning), options.out / "pruned")
    comparison = compare(stock, pruned)
    content = {**asdict(comparison), "stock": stock.model_dump(), "pruned": pruned.model_dump()}
    (options.out / "capacity.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content) if options.json else markdown(comparison, BLOCKS))
    return 0 if comparison.verdict == "holds" else 1


def _run_engine(settings: EngineSettings, folder: Path) -> EngineCounts:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    path.write_text(settings.model_dump_json())
    line = run_engine("benchmarks.cost.capacity", path, log=folder / "log")
    return EngineCounts.model_validate_json(line)


def main() -> None:
    """Read the settings of one engine and print its counts as JSON, in the last line."""
    settings = EngineSettings.model_validate_json(Path(sys.argv[1]).read_text())
    print(count_in_engine(settings).model_dump_json())


if __name__ == "__main__":
    main()
