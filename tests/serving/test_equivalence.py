"""What changes no answer and no kept token: no state, caches, company, bursts, later turns.

Of every backbone, mini-LLaVA among them, the selftest (``test_backbones.py``) checks that K >= N
equals stock vLLM, what chunked prefill, other questions and later turns change, and that deltas and
recalls are disjoint from a shared core. That features are not shared between tenants: the attack
``cache_salt`` of ``tests/hostile``.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.yardsticks.examples import as_picture
from tests.serving.engine import (
    CORES,
    LLAVA,
    STATE,
    TOKENS,
    Engine,
    Prompt,
    Watch,
    alone,
    assert_same,
    built,
    choose,
    examples,
    page,
    raw_prompt,
    render_prompt,
    said,
    start,
    state_with_core,
    turn,
    watch,
)
from tests.serving.runners import Result, Runner, in_engine
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.selftest.questions import picture, video
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving import identities
from vllm_autoprune.serving.identities import make_cache_identity
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.tpdsl.tokens import POSITIONS

pytestmark = pytest.mark.engine


def answer_without_a_state() -> Result:
    """Tokens and exact log-probabilities of a model without a state."""
    engine = start(None)
    talks = [[turn(e.question, e.image)] for e in examples(2)]
    talks.append(
        [turn("Which shape is red?", examples(2)[0].image, examples(2)[-1].image)]
    )
    return [engine.chat(talk, tokens=8)[0] for talk in talks]


@pytest.mark.both
@pytest.mark.reads.with_args(answer_without_a_state)
def test_without_a_state_the_plugin_changes_no_bit(runner: Runner) -> None:
    absent = {"VLLM_AUTOPRUNE_DISABLE": "1"}
    inert = runner.run(answer_without_a_state)
    assert inert == runner.run(answer_without_a_state, environment=absent)


@pytest.mark.both
@in_engine
def test_caches_do_not_change_what_is_kept() -> None:
    """Of prefix cache, multi-modal caches and feature cache; every prompt in one step."""
    no_caches: dict[str, Any] = {
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }
    record = watch()
    answers = []
    selections = []
    questions = examples(3)[:8]
    pair = turn(
        "What digit is on the red shape?", questions[0].image, questions[-1].image
    )
    for settings, options in (
        (STATE, {}),
        ({**STATE, "feature_cache_gb": 0}, no_caches),
    ):
        engine = start(settings, max_num_batched_tokens=4096, **options)
        answers.append(
            [*(engine.ask(example) for example in questions), *engine.chat([pair])]
        )
        selections.append(
            {str([plan.instruction, rows]) for plan, rows in record.take().items()}
        )
        engine.stop()
    assert selections[0] == selections[1]
    assert_same(answers[0], answers[1], tolerance=2e-2)


@in_engine
def test_negative_control_without_the_instruction_in_the_identity() -> None:
    """Shows that answers tell a missing instruction: a trained model then gives wrong ones."""

    def without(
        image: str, served: str, budget: int, keep: Any, ids: Any, *parts: Any
    ) -> str:
        return make_cache_identity(image, served, budget, keep, None, *parts)

    engine = start({**STATE, "budget": 4})
    right = [engine.ask(example) for example in examples(6)]
    engine.llm.reset_prefix_cache()
    with patch.object(identities, "make_cache_identity", without):
        wrong = [engine.ask(example) for example in examples(6)]
    answers = zip(right, wrong, examples(6), strict=True)
    assert any(
        right["text"] == e.answer != wrong["text"] for right, wrong, e in answers
    )


@in_engine
def test_a_state_that_does_not_read_the_instruction_shares_across_questions() -> None:
    engine = start({"state": alone("divprune"), "budget": 32})
    runs = engine.runs
    new, *later = [engine.ask(example)["cached"] for example in examples(1)]
    assert new == 0 and min(later) >= BLOCK
    assert engine.runs - runs == 1


# ---- how long features are held ----


@in_engine
def test_cache_resets_clear_features() -> None:
    engine = start({**STATE, "budget": 16})
    resets = (
        engine.llm.llm_engine.reset_mm_cache,
        engine.llm.llm_engine.reset_encoder_cache,
    )
    cache = engine.model.autoprune.cache
    # One question each, because vLLM's encoder cache would serve a repeated image.
    for reset, example in zip(resets, examples(2)[-2:], strict=True):
        engine.llm.reset_prefix_cache()
        engine.ask(example)
        assert len(cache) > 0
        reset()
        assert len(cache) == 0, reset


@in_engine
def test_new_weights_from_disk_answer_as_a_new_engine() -> None:
    """Projector rows in another order, and another first language layer; then the first again.

    By states that read the text tower, [CLS] attention, and the language model's layers.
    """
    record = watch()
    talk = [turn(examples(1)[0].question, examples(1)[0].image)]

    def answer(engine: Engine) -> list[object]:
        answers: list[object] = []
        for entry in ({}, {"state": "visionzip"}, {"state": "fastv"}):
            answers += engine.chat(talk, tokens=8, entry={"budget": 16, **entry})
            answers.append([*record.take().values()])
        return answers

    def start_model(model: Path) -> Engine:
        return start({**STATE, "requests": "states"}, model=model, dtype="float32")

    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        shutil.copytree(LLAVA, other)
        weights = load_file(other / "model.safetensors")
        for name, weight in weights.items():
            if (
                name.startswith("multi_modal_projector.linear_2")
                or ".layers.0.self_attn.q" in name
            ):
                weights[name] = weight.flip(0).contiguous()
        (other / "model.safetensors").unlink()
        save_file(weights, other / "model.safetensors", {"format": "pt"})
        expected = []
        for model in (LLAVA, other):
            engine = start_model(model)
            expected.append(answer(engine))
            engine.stop()
        engine = start_model(LLAVA)
        answers = [answer(engine)]
        for model in (other, LLAVA):
            # An operator empties vLLM's caches: the prefix cache goes by token ids, and the
            # scheduler counts on encoder outputs that the worker drops.
            engine.empty_caches()
            engine.llm.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(model)}
            )
            answers.append(answer(engine))
    assert answers == [expected[0], expected[1], expected[0]]
    assert all(
        old != new
        for old, new in zip(expected[0][1::2], expected[1][1::2], strict=True)
    )


# ---- many at once ----

POLICIES = (
    None,
    "visionzip",
    "fastv",
    "prumerge_plus",
    "dart",
    "divprune",
    "off",
    "random",
    "resized",
    *CORES,
)
MIXED_POLICIES = (None, None, "divprune", "cdpruner", "off", "random")
SIZES = ((56, 56), (100, 48), (48, 100), (120, 110), (200, 112), (96, 208), (330, 300))
TEXTS = (
    "what colour is the cat",
    "how many dog are there",
    "which shape is on the left",
)
BATCHED: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 640,
}


def assert_together_as_alone(
    engine: Engine, prompts: Sequence[Prompt], images: int, tokens: int = 6
) -> Watch:
    """Requests at once are answered, and keep tokens, as single ones without caches.

    At least so many ``images`` are compared, and answers of so many ``tokens``. What is selected at
    once.
    """
    record = watch()
    together = engine.complete(prompts, tokens)
    selections = record.take()
    at_once = Watch(budgets=list(record.budgets))
    assert engine.complete_alone(prompts, tokens) == together
    # A plan that no single request had is that of an image whose tensors depend on its neighbours.
    assert {
        str(plan) for plan, rows in selections.items() if record.kept.get(plan) != rows
    } == set()
    assert len(selections) > images
    return at_once


@pytest.mark.both
@in_engine
def test_mixed_concurrent_requests_equal_single_ones() -> None:
    """Of every kind: K, states, controls, cores, conversations that recall, positions."""
    mix(64)


def mix(count: int) -> None:
    """Ask mini-LLaVA so many requests at once, and one by one."""
    random = Random(0)
    budgets = (4, 8, 16, 31, 64, TOKENS)
    later = (0, 0, 0, 1, 2)
    recalls = (0, 3, 8)
    prompts = [
        render_prompt(
            random.randrange(len(examples(6))),
            random.choice(budgets),
            random.choice(POLICIES),
            random.choice(later),
            random.choice(recalls),
        )
        for _ in range(count)
    ]
    for request in prompts:
        entry = request["mm_processor_kwargs"]["autoprune"]
        if entry.get("enabled", True):
            entry["positions"] = random.choice([*POSITIONS])
    engine = start({**STATE, "requests": "states"}, **BATCHED)
    at_once = assert_together_as_alone(engine, prompts, images=30)
    assert max(len({*budgets}) for budgets in at_once.budgets) > 2


def interleave(backbone: str, count: int, length: int = 640, blocks: int = 22) -> float:
    """Number of preemptions of mixed requests, few of which fit into the KV cache at once.

    Of every K, state and control, about none, one or several images, some with audio, and
    conversations that recall; pages with and without the cells that a model can drop before its
    tower or inside it; at their places where there is room, spread and packed. The server's state
    has a core and ranks before the merger where it can.
    """
    random = Random(0)
    row = next(row for row in BACKBONES.values() if row.name == backbone)
    merged = {} if "merger_input" in row.missing else {"rank_at": "merger_in"}
    frames = {"frames": {"budget": "curvature"}} if row.videos else {}
    state = {**state_with_core("autoprune"), **merged, **frames, "positions": "true"}
    engine = start(
        {"state": state, "budget": 8, "requests": "states"},
        model=built(backbone),
        **{**BATCHED, "max_model_len": length, "num_gpu_blocks_override": blocks},
        limit_mm_per_prompt={"image": 3, "video": int(row.videos)},
        disable_log_stats=False,
    )
    tiny = TINY_MODELS[backbone]
    mark = tiny.get("image_text", tiny["tokens"][0])
    prompts: list[Prompt] = []
    for _ in range(count):
        numbers = [
            random.randrange(len(SIZES))
            for _ in range(random.choice((0, 1, 1, 1, 2, 3)))
        ]
        images = [
            random.choice((picture, page))(*SIZES[number], number)
            if not row.whole_only
            else picture(*SIZES[number], number)
            for number in numbers
        ]
        text = random.choice(TEXTS)
        later = random.choice(TEXTS)
        question = f"user {' '.join([mark] * len(images))} {text} you"
        entry = choose(random.choice((4, 7, 16, 48)), random.choice(MIXED_POLICIES))
        if images and not row.unsplittable and random.random() < 0.2:
            question += f" blue</s>user {tiny['tokens'][0]} {later} you"
            turns = [{"images": len(images), "text": later}]
            entry |= {"recall": random.choice((0, 6)), "recall_turns": turns}
        if images and entry.get("enabled", True):
            entry["history"] = random.choice(("none", "1:3", "1:1/2", "2:1,every=2"))
        if not row.whole_only and entry.get("enabled", True):
            entry["cells"] = random.choice(
                ("none", "flat", "flat", "predicted", "flat:2", "changed+flat")
            )
        if not row.whole_tower and entry.get("enabled", True):
            entry["tower"] = random.choice(("none", "1/2@1/2", "2/3@1/3", "12@2/3"))
        if not row.mrope and not row.packed and entry.get("enabled", True):
            entry |= (
                {"positions": where}
                if (where := random.choice((None, *POSITIONS)))
                else {}
            )
        prompt = raw_prompt(
            question, images, instructions=[text] * len(images), **entry
        )
        if "audio_config" in tiny.get("config", {}) and random.random() < 0.3:
            prompt["prompt"] = (
                f"{engine.model.get_placeholder_str('audio', 1)} {question}"
            )
            noise = numpy.random.default_rng(len(prompts)).normal(
                size=8000 * random.choice((1, 3))
            )
            prompt["multi_modal_data"]["audio"] = [(noise, 16000)]
        if row.videos and random.random() < 0.4:
            prompt["prompt"] = (
                f"{engine.model.get_placeholder_str('video', 1)} {question}"
            )
            prompt["multi_modal_data"]["video"] = video(
                random.choice((2, 6, 14)), len(prompts) % 9
            )
            if "state" not in entry and entry.get("enabled", True):
                entry["video_budget"] = random.choice(
                    ("1/4", "tokens_per_frame:2", 9, "100%")
                )
                prompt["mm_processor_kwargs"] = {"autoprune": entry}
        prompts.append(
            prompt
            if prompt["multi_modal_data"] != {"image": []}
            else {"prompt": question}
        )
    at_once = assert_together_as_alone(
        engine, prompts, images=min(10, count // 4), tokens=16
    )
    assert max(map(len, at_once.budgets)) > 1
    return engine.counter("vllm:num_preemptions")


@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param(name, marks=() if name == "idefics3" else pytest.mark.exhaustive)
        for name in (
            "idefics3",
            "llava_next",
            "llava_onevision",
            "internvl",
            "qwen2_5_vl",
        )
    ],
)
@in_engine
def test_a_few_interleaved_requests_equal_single_ones(backbone: str) -> None:
    interleave(backbone, 24)


_ROOM = {
    **dict.fromkeys(("cohere2_vision", "cohere_compass", "lfm2_vl"), (640, 44)),
    **dict.fromkeys(("llama4", "gemma4", "exaone4_5"), (640, 44)),
    **dict.fromkeys(("step_vl", "step3"), (2560, 81)),
    "step3p7": (2560, 170),
}
"""Length of a prompt and blocks of the KV cache where 640 and 22 are too few: layers of several
kinds, and pictures of a size that vLLM's code says."""


@pytest.mark.exhaustive
@pytest.mark.only("v1")
@pytest.mark.parametrize(
    "backbone", [name for name in TINY_MODELS if not name.startswith("qwen3_5")]
)
def test_300_interleaved_requests_equal_single_ones(
    runner: Runner, backbone: str
) -> None:
    """In float32; Qwen3.5's linear attention on a CPU rounds a preempted request differently."""
    length, blocks = _ROOM.get(backbone, (640, 22))
    preemptions = runner.run(
        interleave, backbone=backbone, count=300, length=length, blocks=blocks
    )
    assert preemptions > 0 or blocks > 100


BURST_SIZES = ((448, 448), (56, 56), (280, 112), (112, 336), (84, 84), (224, 224))
# Without its limit Qwen is profiled with a video.
_TINY: Mapping[str, Any] = {"max_model_len": 1024, "limit_mm_per_prompt": {"image": 8}}
BURSTS: Mapping[str, Mapping[str, Any]] = {
    "llava": {},
    "qwen2_5_vl": {**_TINY, "limit_mm_per_prompt": {"image": 8, "video": 0}},
    "llava_next": _TINY,
}
"""Model and how it is served -> options of its engine."""


@pytest.mark.both
@pytest.mark.parametrize("model", BURSTS)
@in_engine
def test_bursts_are_encoded_within_bounds_and_keep_what_single_requests_keep(
    model: str,
) -> None:
    """No encoder call exceeds the largest one of vLLM's profiling run, in tokens or in bytes."""
    minillava = model == "llava"
    engine = start(
        {**STATE, "budget": 4} if minillava else {"state": "autoprune", "budget": 4},
        LLAVA if minillava else built(model),
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        **BURSTS[model],
    )
    served = engine.model
    runner = engine.runner
    calls: dict[str, list[int]] = {"tokens": [], "bytes": []}
    encode = served.embed_multimodal

    def embed(**inputs: object) -> object:
        tensors = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, Tensor | list) and name != "autoprune_plan"
        }
        tokens = sum(image.tokens for image in served.autoprune.images(tensors))
        parts = [part for value in tensors.values() for part in value]
        calls["tokens"].append(tokens)
        calls["bytes"].append(sum(part.numel() * part.element_size() for part in parts))
        return encode(**inputs)

    served.embed_multimodal = embed
    # vLLM profiles only GPUs at start; on a CPU the compiler's warm-up does it.
    with torch.inference_mode():
        runner.profile_run()
    profiled = {name: max(sizes) for name, sizes in calls.items()}
    calls.update(tokens=[], bytes=[])
    record = watch()

    def ask_about(requests: Iterable[int]) -> list[dict[str, Any]]:
        pictures = [picture(*BURST_SIZES[i % len(BURST_SIZES)], i) for i in requests]
        return engine.chat(
            *([turn("what colour is the cat", image)] for image in pictures)
        )

    together = ask_about(range(36))
    selections = record.take()
    assert 1 < len(calls["tokens"]) < len(together)
    assert max(calls["tokens"]) <= profiled["tokens"]
    if model != "llava_next":  # padding is removed after its tower
        assert max(calls["bytes"]) <= profiled["bytes"]
    engine.empty_caches()
    single = [answer for i in range(36) for answer in ask_about([i])]
    assert record.take() == selections
    for answer, expected in zip(together, single, strict=True):
        assert answer["prompt_tokens"] == expected["prompt_tokens"]
        assert answer["logprob"] == pytest.approx(expected["logprob"], abs=0.1)


# ---- cores and recalls ----

BUDGET = 64
RECALL = 8
QUESTIONS = (
    "What colour is the circle?",
    "How many shapes are there?",
    "Is there a square?",
)


def _take_parts(record: Watch) -> list[tuple[str, tuple[int, int], int, list[int]]]:
    """Part, image, K_c and kept tokens of each item since the last call."""
    return [
        (plan.part, plan.key, plan.core, rows) for plan, rows in record.take().items()
    ]


def _start_with_core(state: Mapping[str, object], **options: Any) -> Engine:
    return start({**STATE, "state": state, "budget": BUDGET}, **options)


@pytest.mark.both
@in_engine
def test_cores_of_all_images_come_before_their_deltas() -> None:
    """So 48 tokens of the first core and most of the second are shared by two questions."""
    engine = _start_with_core(state_with_core())
    image = examples(1)[0].image
    other = examples(3)[-1].image
    asked_first, asked_next = (
        engine.chat([turn(text, image, other)])[0] for text in QUESTIONS[:2]
    )
    assert asked_first["cached"] < asked_next["cached"] == 3 * BLOCK


@pytest.mark.both
@in_engine
def test_a_conversation_goes_on_from_the_blocks_of_its_split_image() -> None:
    engine = _start_with_core(state_with_core())
    question = turn(QUESTIONS[0], examples(1)[0].image)
    about_another = turn(QUESTIONS[0], examples(3)[-1].image)
    (answer,) = engine.chat([question])
    (later,) = engine.chat([question, said("red"), about_another])
    assert answer["cached"] == 0
    assert later["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK


@pytest.mark.both
@in_engine
def test_an_image_stays_whole_where_the_prefix_has_its_question() -> None:
    """The task of a screenshot, or a text before the image."""
    engine = _start_with_core(state_with_core())
    record = watch()
    image = examples(1)[0].image
    shot = {"role": "tool", "content": turn("Done.", image)["content"]}
    for task in QUESTIONS:
        engine.chat([{"role": "user", "content": task}, said("I look."), shot])
    shots = _take_parts(record)
    assert {part for part, *_ in shots} == {"whole"}
    assert len({str(rows) for *_, rows in shots}) > 1, "the task chooses its tokens"
    text = f"USER: {QUESTIONS[0]} <image>\nASSISTANT:"
    engine.generate([raw_prompt(text, as_picture(image), instructions=[QUESTIONS[0]])])
    assert {part for part, *_ in _take_parts(record)} == {"whole"}


@pytest.mark.both
@in_engine
def test_a_split_image_keeps_the_tokens_of_a_whole_one() -> None:
    """Without a prefix cache no image is split."""
    questions = [turn(question, examples(1)[0].image) for question in QUESTIONS]
    engine = _start_with_core(state_with_core())
    record = watch()
    lengths = [engine.chat([question])[0]["prompt_tokens"] for question in questions]
    parts = _take_parts(record)
    engine.stop()

    (core,) = (part for part in parts if part[0] == "core")
    assert core[2] == 61, "the share below gives the core that was aligned to blocks"
    aligned = state_with_core(share=61 / 64)
    engine = _start_with_core(aligned, enable_prefix_caching=False)
    record.take()
    for question, length in zip(questions, lengths, strict=True):
        assert engine.chat([question])[0]["prompt_tokens"] == length
    unsplit = [(part, sorted(rows)) for part, *_, rows in _take_parts(record)]
    split = [sorted([*core[-1], *rows]) for part, *_, rows in parts if part == "delta"]
    assert unsplit == [("whole", rows) for rows in split]
    assert len(split) == len(QUESTIONS)
    assert len({str(rows) for rows in split}) > 1


@pytest.mark.both
@in_engine
def test_a_request_says_how_much_of_an_image_later_turns_recall() -> None:
    engine = start({**STATE, "budget": BUDGET, "recall": RECALL, "requests": "states"})
    record = watch()
    runs = engine.runs
    image, other = examples(1)[0].image, examples(3)[-1].image
    talk = [turn(QUESTIONS[0], image)]
    for question in QUESTIONS[1:]:
        talk += [said("two"), turn(question)]
    answers = [engine.chat(talk[:count])[0] for count in (1, 3, 5)]
    for answer, later in itertools.pairwise(answers):
        # All full blocks of the turn before, whose answer is part of the conversation.
        assert later["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK > 0
    assert engine.runs - runs == 1

    def recall(tokens: int, **more: object) -> dict[str, Any]:
        return engine.chat(talk, entry={"recall": tokens, **more})[0]

    engine.empty_caches()
    lengths = {k: recall(k)["prompt_tokens"] for k in (0, 3, RECALL, 1000)}
    # Each turn's tokens end in a line break, as the chat template writes images, and a space.
    assert 0 <= lengths[3] - lengths[0] - 2 * 3 <= 2 * 2
    assert lengths[RECALL] - lengths[3] == 2 * (RECALL - 3)
    # Not more than is left of it.
    assert TOKENS - BUDGET <= lengths[1000] - lengths[0] <= TOKENS - BUDGET + 2 * 2

    # An image that keeps everything recalls nothing.
    assert_same([recall(3, enabled=False)], [recall(0, enabled=False)])

    # A turn after two images recalls tokens of both.
    engine.empty_caches()
    record.take()
    later_turns = (
        said("yes"),
        turn("And here?", other),
        said("no"),
        turn("Which is larger?"),
    )
    engine.chat([*talk[:3], *later_turns])
    parts = _take_parts(record)
    first_key, other_key = (key for part, key, *_ in parts if part == "whole")
    recalls = sorted(
        (key, len(rows)) for part, key, _, rows in parts if part == "recall"
    )
    half = RECALL // 2
    assert recalls == sorted(
        [(first_key, RECALL), (first_key, half), (other_key, half)]
    )
