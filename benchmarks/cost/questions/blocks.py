"""KV blocks in use while questions on one image are answered together.

LLaVA-NeXT-7B's tokens on one narrow layer, as in :mod:`benchmarks.cost.capacity`. Each engine runs
in a process of its own, ``python -m benchmarks.cost.questions.blocks SETTINGS``; a first question
on the image has been answered before others are sent at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import StrictModel
from benchmarks.common.pictures import draw_picture
from benchmarks.common.report import Claim, Section, Table
from benchmarks.common.shapes import IMAGE_TOKEN, write_llava_next
from benchmarks.cost.capacity import build_prompt, step_through
from benchmarks.cost.overhead.settings import draw_words
from benchmarks.cost.questions.arms import ARMS, BLOCK, FREE, SPLIT, STOCK, TODAY, state_of
from benchmarks.server import run_engine
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.statistics import verdict_of

SIDE, BUDGET = 672, 320
WORDS, OUTPUT_TOKENS = 16, 12
AT_ONCE = (1, 2, 4, 8, 16)
GAIN = 2.0
"""How many times fewer blocks the split has to hold than a state that reads the question."""

_BEHIND = 2
"""Tokens of the template behind a question, in addition to its words."""


class EngineSettings(StrictModel):
    """What is served."""

    model: str
    state: str | None


class EngineCounts(StrictModel):
    """Counts of one engine."""

    before: int
    """Tokens of the template before the image."""
    prompt_tokens: int
    blocks: tuple[int, ...]
    """Most blocks in use with each number of questions of :data:`AT_ONCE`."""


def predict_blocks(shared_tokens: int, prompt_tokens: int, questions: int) -> int:
    """Blocks of ``questions`` requests whose first ``shared_tokens`` are the same.

    The last token of an answer is never stored.
    """
    shared = shared_tokens // BLOCK
    each = -(-(prompt_tokens + OUTPUT_TOKENS - 1) // BLOCK)
    return shared + questions * (each - shared)


def count_shared_tokens(arm: str, counts: EngineCounts, share: float) -> int:
    """Tokens at the start of a prompt that all questions on its image have in common."""
    from vllm_autoprune.serving.api.image_split import SplitImage, align_core

    if arm in (STOCK, FREE):
        return counts.prompt_tokens - WORDS - _BEHIND
    if arm == TODAY:
        return counts.before
    image = SplitImage(BUDGET, int(share * BUDGET), 0)
    return counts.before + align_core(counts.before, image, BLOCK)


def count_in_engine(settings: EngineSettings) -> EngineCounts:
    """Ask one question alone, then others about the same image, more at once each time."""
    from vllm import LLM

    pruning = {"state": settings.state, "budget": BUDGET}
    llm = LLM(
        model=settings.model,
        load_format="dummy",
        enforce_eager=True,
        dtype=choose_dtype(),
        block_size=BLOCK,
        max_model_len=4096,
        max_num_seqs=max(AT_ONCE),
        # Large enough to compute all questions in one step, so that all are live together.
        max_num_batched_tokens=8192,
        additional_config={} if settings.state is None else {"autoprune": pruning},
    )
    picture = draw_picture(0, SIDE, SIDE)
    number, blocks, lengths = 1, [], set[int]()
    for together in (1, *AT_ONCE):
        prompts = [build_prompt(picture, draw_words(WORDS, number + at)) for at in range(together)]
        number += together
        more, steps = step_through(llm, prompts, OUTPUT_TOKENS)
        lengths |= more
        if max(running for running, _ in steps) != together:
            raise RuntimeError(f"{together} questions were not answered together")
        blocks.append(max(used for _, used in steps))
    (prompt_tokens,) = lengths
    ids = llm.get_tokenizer()(prompts[0]["prompt"])["input_ids"]
    return EngineCounts(
        before=ids.index(IMAGE_TOKEN), prompt_tokens=prompt_tokens, blocks=tuple(blocks[1:])
    )


def measure(state: str, share: float, out: Path) -> dict[str, EngineCounts]:
    """Counts of every arm, each in an engine of its own."""
    model = write_llava_next(out / "narrow", layers=1, tower_layers=2, width=128)
    counts: dict[str, EngineCounts] = {}
    for arm in ARMS:
        path = out / f"blocks-{arm}.json"
        settings = EngineSettings(model=str(model), state=state_of(arm, state, share, out))
        path.write_text(settings.model_dump_json())
        line = run_engine("benchmarks.cost.questions.blocks", path, log=path.with_suffix(".log"))
        counts[arm] = EngineCounts.model_validate_json(line)
    return counts


def build_section(counts: Mapping[str, EngineCounts], share: float) -> Section:
    """Measured and predicted blocks, and whether the split holds few enough."""
    predicted = {
        arm: [
            predict_blocks(count_shared_tokens(arm, one, share), one.prompt_tokens, questions)
            for questions in AT_ONCE
        ]
        for arm, one in counts.items()
    }
    gain = counts[TODAY].blocks[-1] / counts[SPLIT].blocks[-1]
    equal = all(list(one.blocks) == predicted[arm] for arm, one in counts.items())
    return Section(
        name="blocks",
        title="KV blocks of questions on one image that are answered together",
        setup=[
            f"LLaVA-NeXT-7B's tokens on one narrow layer, K = {BUDGET} of 2880, a core of {share:g}"
            f", blocks of {BLOCK} tokens",
            f"questions of {WORDS} words, answers of {OUTPUT_TOKENS} tokens; a first question on "
            "the image was answered before",
        ],
        claims=[
            Claim(
                f"at {AT_ONCE[-1]} questions the split holds at least {GAIN:g} times fewer blocks "
                f"than {TODAY}",
                f"{gain:.2f} times",
                verdict_of(gain >= GAIN),
            ),
            Claim(
                "blocks are as predicted: shared ones once, all others for each question",
                "all equal" if equal else "some differ",
                verdict_of(equal),
            ),
        ],
        tables=[_table(counts, predicted)],
        data={
            arm: {**one.model_dump(), "predicted": predicted[arm]} for arm, one in counts.items()
        },
    )


def _table(counts: Mapping[str, EngineCounts], predicted: Mapping[str, Sequence[int]]) -> Table:
    columns = ("arm", "prompt tokens", *(f"{number} at once" for number in AT_ONCE))
    rows = [
        (
            arm,
            str(one.prompt_tokens),
            *(
                str(seen) if seen == expected else f"{seen} (predicted {expected})"
                for seen, expected in zip(one.blocks, predicted[arm], strict=True)
            ),
        )
        for arm, one in counts.items()
    ]
    return Table("Blocks in use.", columns, rows, "l" + "r" * (1 + len(AT_ONCE)))


def main() -> None:
    """Read the settings of one engine and print its counts as JSON, in the last line."""
    settings = EngineSettings.model_validate_json(Path(sys.argv[1]).read_text())
    print(count_in_engine(settings).model_dump_json())


if __name__ == "__main__":
    main()
