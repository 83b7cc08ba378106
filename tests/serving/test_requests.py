"""States in requests, compared with servers of them; concurrent requests, with single ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.engine import (
    CORES,
    STATE,
    TOKENS,
    Prompt,
    alone,
    assert_same,
    built,
    choose,
    complete,
    complete_alone,
    examples,
    generate,
    generate_each,
    model_of,
    prompt,
    raw_prompt,
    release,
    render_prompt,
    start,
    watch,
)
from tests.serving.runners import Result, in_engine
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.selftest.serve import empty_caches, picture
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@in_engine
def test_a_state_of_a_request_is_served_as_the_state_of_a_server() -> Result:
    """Named or whole; to an engine of another state all at once, and one by one, nothing cached."""
    questions = examples(1)[:2]
    keys = list(product(("autoprune", "visionzip", "fastv"), (8, 24), range(len(questions))))
    native = []
    for name in ("autoprune", "visionzip", "fastv"):
        llm = start({**STATE, "state": name, "requests": "budget"})
        prompts = [prompt(questions[i], budget=k) for state, k, i in keys if state == name]
        native += generate_each(llm, prompts)
        release(llm)
    llm = start({**STATE, "state": alone("divprune"), "requests": "states"})
    documents = [load_state(name).model_dump(mode="json") if i else name for name, _, i in keys]
    brought = [
        prompt(questions[i], budget=k, state=state)
        for (_, k, i), state in zip(keys, documents, strict=True)
    ]
    together = generate(llm, brought)
    empty_caches(llm)
    again = generate_each(llm, brought)
    assert_same(together, native, tolerance=3e-2)
    assert_same(again, native, tolerance=3e-2)

    # The prefix cache is not shared between states.
    empty_caches(llm)
    at, other = keys.index(("visionzip", 24, 0)), keys.index(("autoprune", 24, 0))
    answers = generate_each(llm, [brought[at], brought[at], brought[other]])
    new, repeated, of_another_state = (answer["cached"] for answer in answers)
    assert new == of_another_state == 0 and repeated >= BLOCK
    return native, together


# ---- mixed concurrent requests ----

POLICIES = (
    *(None, "visionzip", "fastv", "prumerge_plus", "dart", "divprune", "off", "random", "resized"),
    *CORES,
)
TILED = ("llava_next", "llava_onevision", "idefics3", "internvl")
TILED_POLICIES = (None, None, "divprune", "cdpruner", "off", "random")
SIZES = ((56, 56), (100, 48), (48, 100), (120, 110), (200, 112), (96, 208), (330, 300))
TEXTS = ("what colour is the cat", "how many dog are there", "which shape is on the left")
ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 640,
}


def assert_together_as_alone(
    llm: LLM, prompts: Sequence[Prompt], images: int
) -> tuple[int, int, list[list[int]]]:
    """Requests at once are answered, and keep tokens, as single ones without caches.

    At least so many ``images`` are compared; the most images in one selection, the most values of
    K, and the answers.
    """
    seen = watch()
    together, kept = complete(llm, prompts, 6), seen.take()
    at_once = max(map(len, seen.budgets))
    budgets_at_once = max(len({*budgets}) for budgets in seen.budgets)
    assert complete_alone(llm, prompts, 6) == together
    # A plan that no single request had is that of an image whose tensors depend on its neighbours.
    assert {str(plan) for plan, rows in kept.items() if seen.kept.get(plan) != rows} == set()
    assert len(kept) > images
    return at_once, budgets_at_once, together


@in_engine
def test_mixed_concurrent_requests_equal_single_ones() -> Result:
    """Of every kind: K, states, controls, cores, conversations that recall."""
    random = Random(0)
    budgets, later, recalls = (4, 8, 16, 31, 64, TOKENS), (0, 0, 0, 1, 2), (0, 3, 8)
    prompts = [
        render_prompt(
            random.randrange(len(examples(6))),
            random.choice(budgets),
            random.choice(POLICIES),
            random.choice(later),
            random.choice(recalls),
        )
        for _ in range(64)
    ]
    llm = start({**STATE, "requests": "states"}, **ENGINE)
    _, budgets_at_once, answers = assert_together_as_alone(llm, prompts, images=30)
    assert budgets_at_once > 2
    return answers


@pytest.mark.parametrize("backbone", TILED)
@in_engine
def test_images_of_mixed_tiles_keep_what_they_keep_alone(backbone: str) -> None:
    """In a KV cache that is too small: one request of three whole images fits, but not sixteen."""
    random = Random(0)
    small = {**ENGINE, "max_model_len": 640, "num_gpu_blocks_override": 24}
    settings = {"state": "autoprune", "budget": 8, "requests": "states"}
    llm = start(settings, model=built(backbone), **small)
    mark = model_of(llm).get_placeholder_str("image", 1)
    prompts = []
    for _ in range(24):
        numbers = [random.randrange(len(SIZES)) for _ in range(random.choice((1, 1, 2, 3)))]
        text = random.choice(TEXTS)
        entry = choose(random.choice((4, 7, 16)), random.choice(TILED_POLICIES))
        images = [picture(*SIZES[number], number) for number in numbers]
        asked = f"user {f'{mark} ' * len(images)}{text} you"
        prompts.append(raw_prompt(asked, images, instructions=[text] * len(images), **entry))
    at_once, *_ = assert_together_as_alone(llm, prompts, images=10)
    assert at_once > 1
