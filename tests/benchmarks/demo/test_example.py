"""Recomputed selections and answers of the committed checkpoint."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.demo.chat_client import Answer
from benchmarks.demo.configurations import FULL, PRUNED, Configuration, everything_kept
from benchmarks.demo.example import SHOWN, Explainer, draw_example
from benchmarks.demo.measure import Measured, Settings, draw_questions
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.split import CHECKPOINT, CLIP, LLAVA, Example, draw_examples, png
from vllm_autoprune import load_state
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE, ServedState
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_POSITIVE = 0x7FFF_FFFF_FFFF_FFFF
EXAMPLES = [e for e in draw_examples("test", 2) if e.kind in ("digit", "colour")]


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(LLAVA, CLIP, "autoprune", "bfloat16")  # as the reader


def image(example: Example) -> Image.Image:
    return Image.open(io.BytesIO(png(example.image)))


def kept(explainer: Explainer, example: Example, configuration: Configuration) -> tuple[int, ...]:
    return explainer.explain(image(example), example.question, configuration).kept


@pytest.mark.parametrize("configuration", PRUNED, ids=lambda c: c.label)
def test_exactly_k_patches_are_kept_in_raster_order(
    explainer: Explainer, configuration: Configuration
) -> None:
    patches = kept(explainer, EXAMPLES[0], configuration)

    assert len(patches) == configuration.budget
    assert list(patches) == sorted(set(patches)) and set(patches) <= set(range(144))


def test_the_base_policy_keeps_its_own_selection(explainer: Explainer) -> None:
    policy = BASE_POLICIES["cdpruner"]
    tokens = Reader(CHECKPOINT).encode(EXAMPLES)
    expected = policy.select(policy.call(name=policy.name).params, tokens, 8).picks

    patches = [kept(explainer, example, Configuration("reference", 8)) for example in EXAMPLES]

    assert patches == [tuple(sorted(row)) for row in expected.tolist()]


def test_the_state_exchanges_at_most_two_of_its_base_policy(explainer: Explainer) -> None:
    for example in EXAMPLES:
        base = set(kept(explainer, example, Configuration("reference", 8)))
        assert len(base & set(kept(explainer, example, Configuration("state", 8)))) >= 6


def test_a_random_keep_depends_on_the_image_alone(explainer: Explainer) -> None:
    k8 = Configuration("random", 8)
    first, second = EXAMPLES[:2]
    other = next(e for e in EXAMPLES if e.image_id != first.image_id)
    assert first.image_id == second.image_id and first.question != second.question

    assert kept(explainer, first, k8) == kept(explainer, second, k8)
    assert kept(explainer, other, k8) != kept(explainer, first, k8)


@pytest.mark.compat
def test_a_random_keep_is_drawn_as_a_server_draws_it(explainer: Explainer) -> None:
    """From the key in the plan that vLLM's processor sends along with the pixels."""
    from vllm.config import ModelConfig
    from vllm.multimodal.processing import InputProcessingContext
    from vllm.tokenizers import get_tokenizer

    from vllm_autoprune.serving.models.llava import AutopruneLlavaForConditionalGeneration

    config = ModelConfig(model=str(LLAVA), dtype="bfloat16", max_model_len=1024)
    served = ServedState("LlavaForConditionalGeneration", load_state("autoprune"), 8, None, 0)
    attach(config, ATTRIBUTE, served)
    context = InputProcessingContext(config, get_tokenizer(str(LLAVA)))
    factory = AutopruneLlavaForConditionalGeneration._processor_factory
    processor = factory.build_processor(context)
    images = {"image": image(EXAMPLES[0]).convert("RGB")}
    arguments = {"autoprune": {"keep": "random", "instructions": ["what?"]}}
    outputs = processor(
        [1, processor._placeholders.token(processor.info)],
        processor.info.parse_mm_data(images),
        hf_processor_mm_kwargs=arguments,
    )
    plan = ItemPlan.decode(outputs["mm_kwargs"]["image"][0][FIELD].data)
    expected = torch.randperm(144, generator=torch.Generator().manual_seed(plan.key[0] & _POSITIVE))
    assert kept(explainer, EXAMPLES[0], Configuration("random", 8)) == tuple(
        sorted(expected[:8].tolist())
    )


def test_everything_kept_answers_right_and_as_the_full_image_does(explainer: Explainer) -> None:
    for example in EXAMPLES:
        arguments = (image(example), example.question)
        full = explainer.explain(*arguments, FULL)
        control = explainer.explain(*arguments, everything_kept(144))
        assert full.answer == control.answer == example.answer
        assert full.kept == control.kept == tuple(range(144))


def test_the_example_is_drawn_and_its_answers_compared(tmp_path: Path) -> None:
    questions = draw_questions(scenes=1)
    right = [Answer(f" {example.answer}", 28) for example in questions.examples]
    answers = dict.fromkeys(SHOWN, right) | {SHOWN[1]: [Answer("none", 28)] * len(right)}
    setting = Settings(LLAVA, CLIP, "autoprune", 1, tmp_path)

    drawn = draw_example(setting, questions, Measured(answers))

    with Image.open(tmp_path / "kept.png") as sheet:
        assert sheet.width > 2000
    assert drawn.served["full"] == drawn.offline["full"] == drawn.expected
    assert drawn.served["random 8"] == "none" != drawn.offline["random 8"]
    assert not drawn.agrees
    json.dumps(drawn.__dict__)
