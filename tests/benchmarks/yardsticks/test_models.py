"""The committed models: names, sizes, and answers as transformers' own forward passes give them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoProcessor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from benchmarks.common.requests import build_body, build_content, encode_picture
from benchmarks.server import serve
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    IMAGE_TOKEN,
    LLAVA,
    Example,
    as_picture,
    draw_examples,
    format_prompt,
    weights_digest,
)
from benchmarks.yardsticks.minigemma import MiniGemma
from benchmarks.yardsticks.miniintern import MiniIntern
from benchmarks.yardsticks.minillava import MiniLlava, _LlamaPrefix
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.pages import TOKEN
from benchmarks.yardsticks.scenes import PATCHES, normalize_pixels
from benchmarks.yardsticks.train_clips import lay_out
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Case, Yardstick, record_outputs


@pytest.fixture(scope="module")
def llava() -> MiniLlava:
    return MiniLlava()


@pytest.fixture(scope="module")
def qwen() -> MiniQwen:
    return MiniQwen()


@pytest.fixture(scope="module")
def scenes() -> list[Example]:
    return draw_examples("validation", 2)[:24]


@pytest.fixture(scope="module")
def page() -> list[Example]:
    return [e for e in draw_examples("search", 2, "miniqwen") if e.image_id == 1]


def test_weights_are_those_of_published_figures() -> None:
    digests = {name: weights_digest(folder) for name, folder in CHECKPOINTS.items()}
    expected = {
        "minillava": "88389577245b",
        "miniqwen": "99d8b3ecb648",
        "miniintern": "bbe2912f26c5",
        "minigemma": "2cf4c2ea225e",
        "clips": "986c9ae11c58",
    }
    assert digests == expected


def test_processors_and_chat_templates_make_the_prompts_of_training() -> None:
    example = draw_examples("test", 1)[0]
    content = [{"type": "image"}, {"type": "text", "text": example.question}]
    chat = [{"role": "user", "content": content}]
    processor, qwen = (
        AutoProcessor.from_pretrained(f) for f in (LLAVA, CHECKPOINTS["miniqwen"])
    )
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=example.image, text=text, return_tensors="pt")
    assert text == format_prompt(example.question)
    assert int((inputs.input_ids == IMAGE_TOKEN).sum()) == PATCHES
    expected = normalize_pixels(example.image[None])
    assert torch.allclose(inputs.pixel_values.float(), expected, atol=0.02)
    text = qwen.apply_chat_template(chat, add_generation_prompt=True)
    assert text == format_prompt(example.question, "miniqwen")
    # An answer in a request has the tokens of training.
    for answer in ("13", " 13"):
        messages = [*chat, {"role": "assistant", "content": answer}]
        text = qwen.apply_chat_template(messages, continue_final_message=True)
        ids = qwen.tokenizer(text, add_special_tokens=False).input_ids
        assert ids[-2:] == qwen.tokenizer(" 13", add_special_tokens=False).input_ids


def test_all_tokens_answer_right_and_fewer_do_not(
    llava: MiniLlava, qwen: MiniQwen
) -> None:
    def accuracy(yardstick: Yardstick, examples: list[Example], case: Case) -> float:
        scores = [
            yardstick.encode(batch).score(case) for batch in yardstick.batches(examples)
        ]
        return float(torch.cat([score.correct for score in scores]).float().mean())

    full = Case("full", ALL_TOKENS)
    (half, _, eighth, _) = MiniQwen.budgets
    assert accuracy(llava, draw_examples("validation", 3), full) >= 0.9
    assert accuracy(MiniIntern(), draw_examples("test", 6, "miniintern"), full) > 0.8
    assert accuracy(MiniGemma(), draw_examples("test", 6, "minigemma"), full) > 0.8
    examples = draw_examples("test", 16, "miniqwen")
    cases = {
        "full": full,
        "half": Case("resized", half),
        "eighth": Case("resized", eighth),
        "oracle": Case("oracle", eighth),
        "random": Case("random", eighth),
    }
    share = {name: accuracy(qwen, examples, case) for name, case in cases.items()}
    assert min(share["full"], share["oracle"]) > 0.8
    assert share["half"] > share["random"]
    assert max(share["eighth"], share["random"]) < share["full"] - 0.2


def score_answer(model: Any, answer: list[int], **inputs: Tensor) -> float:
    """Log-probability of the last ids of a sequence, by the forward pass of the whole model."""
    logits = model(**inputs).logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)
    return float(logits.gather(1, torch.tensor(answer)[:, None]).sum())


@torch.no_grad()
def test_answers_score_as_in_the_whole_llava(
    llava: MiniLlava, scenes: list[Example]
) -> None:
    model = llava.network
    tokenizer = llava.tokenizer
    scores = llava.encode(scenes[:4]).score(Case("full", ALL_TOKENS))
    for example, logprob in zip(scenes, scores.logprob.tolist(), strict=False):
        prompt = format_prompt(example.question).replace("<image>", "<image>" * PATCHES)
        answer = [*tokenizer(f" {example.answer}").input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([tokenizer(prompt).input_ids + answer])
        pixels = normalize_pixels(example.image[None])
        expected = score_answer(model, answer, input_ids=ids, pixel_values=pixels)
        assert logprob == pytest.approx(expected, abs=0.05)


@torch.no_grad()
@pytest.mark.parametrize("divisor", [1, 4])
def test_answers_score_as_in_the_whole_qwen(page: list[Example], divisor: int) -> None:
    qwen = MiniQwen()
    image = page[0].image
    qwen.network.float()
    budget = image.shape[1] * image.shape[2] // TOKEN**2 // divisor
    scores = qwen.score_image(page, qwen.encode_image(image, budget))
    assert scores.tokens <= budget
    for example, logprob in zip(page, scores.logprob.tolist(), strict=True):
        limits = {"shortest_edge": TOKEN**2, "longest_edge": budget * TOKEN**2}
        answer = f" {example.answer}<|im_end|>"
        inputs = qwen.processor(
            text=[format_prompt(example.question, "miniqwen") + answer],
            images=[as_picture(image)],
            images_kwargs={"size": limits},
            return_tensors="pt",
        )
        expected = score_answer(
            qwen.network, qwen.tokenizer(answer).input_ids, **inputs
        )
        assert logprob == pytest.approx(expected, abs=0.01)


def test_the_prefix_is_what_the_language_model_computes(
    llava: MiniLlava, scenes: list[Example]
) -> None:
    tokens = llava.encode(scenes).tokens
    served = tokens.require_language()
    embeds = served.read("embeddings", 0).float()
    model = MiniLlava().network.model.language_model.float()
    prefix = _LlamaPrefix(model, embeds, served.start, served.text)
    output = model(
        inputs_embeds=embeds,
        output_hidden_states=True,
        output_attentions=True,
        use_cache=False,
    )
    last = prefix.layers - 1
    rows = prefix.text.shape[1]
    states = prefix.read("states", 0)
    normed = prefix.read("normed", last)
    torch.testing.assert_close(states, output.hidden_states[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(normed, output.last_hidden_state, atol=1e-2, rtol=1e-3)
    for layer in (0, last):
        attention = prefix.read("attention", layer)
        expected = output.attentions[layer]
        torch.testing.assert_close(
            attention, expected[:, :, -rows:], atol=1e-3, rtol=1e-3
        )
    assert torch.equal(
        embeds[:, prefix.start : prefix.start + PATCHES], tokens.features.float()
    )
    assert prefix.read("keys", 1).shape[2] == embeds.shape[1]


def test_an_image_is_what_its_patches_are(
    qwen: MiniQwen, page: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over a token's patches: of the last layer, of its output, of an early one's norms."""
    probabilities: list[Tensor] = []
    attend = modeling_qwen3_vl.eager_attention_forward

    def record(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        output, weights = attend(*args, **kwargs)
        probabilities.append(weights)
        return output, weights

    monkeypatch.setattr(modeling_qwen3_vl, "eager_attention_forward", record)
    tower = qwen.network.model.visual
    early = tower.config.deepstack_visual_indexes[0]
    with record_outputs(
        tower, [f"blocks.{early}", f"blocks.{len(tower.blocks) - 1}"]
    ) as outputs:
        image = qwen.encode_image(page[0].image)
    middle, last = (output.float().unflatten(0, (-1, 4)) for output in outputs.values())
    expected = probabilities[-1][0].float().mean((0, 1)).view(-1, 4).mean(1)
    assert torch.allclose(image.attention, expected, atol=1e-3)
    assert torch.allclose(image.encoder, last.mean(1), atol=1e-4)
    norms = torch.stack((middle.abs().sum(2), middle.norm(dim=2)), 2).mean(1)
    assert torch.allclose(image.merger_norms, norms, rtol=1e-4)


def test_each_question_has_relevance_of_its_own(
    qwen: MiniQwen, page: list[Example]
) -> None:
    tokens = qwen.encode(page).tokens
    assert tokens.instruction is not None
    ids = qwen.tokenizer(page[2].question, add_special_tokens=False).input_ids
    mean = qwen.network.get_input_embeddings()(torch.tensor(ids)).float().mean(0)
    assert torch.allclose(tokens.instruction.text[2, 0], mean)


@pytest.mark.engine
def test_a_server_writes_the_prompts_that_clips_are_trained_on_and_answers() -> None:
    right = list[bool]()
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS["clips"] / "tokenizer.json"))
    image, video = map(tokenizer.token_to_id, ("<|image_pad|>", "<|video_pad|>"))
    flags = "--enforce-eager --block-size 32 --max-model-len 4096"
    with serve(CHECKPOINTS["clips"], *flags.split()) as server:
        for example in draw_examples("test", 4, "clips"):
            pictures = [encode_picture(as_picture(frame)) for frame in example.image]
            data = ",".join(picture.partition(",")[2] for picture in pictures)
            clip = {
                "type": "video_url",
                "video_url": {"url": f"data:video/jpeg;base64,{data}"},
            }
            content = [*build_content(example.question), clip]
            fields = {"return_token_ids": True}
            body = build_body(
                server.model, content, tokens=4, stream=False, fields=fields
            )
            url = f"{server.url}/v1/chat/completions"
            kind = {"Content-Type": "application/json"}
            reply = httpx.post(url, content=body, headers=kind, timeout=300).json()
            ids = [image if id == video else id for id in reply["prompt_token_ids"]]
            before, _, _ = lay_out(tokenizer, len(example.image))
            text = example.question + "<|im_end|>\n<|im_start|>assistant\n"
            assert ids == [*before.tolist(), *tokenizer.encode(text).ids]
            right.append(example.is_right(reply["choices"][0]["message"]["content"]))
    assert sum(right) / len(right) > 0.9
