"""The committed models: names, sizes, and answers as transformers' own forward passes give them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPModel,
    LlavaForConditionalGeneration,
)
from transformers.models.qwen3_vl import modeling_qwen3_vl

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    CLIP,
    LLAVA,
    Example,
    as_picture,
    draw_examples,
    format_prompt,
    image_size,
)
from benchmarks.yardsticks.minillava import LlamaPrefix, MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.pages import TOKEN
from benchmarks.yardsticks.scenes import PATCHES, normalize_pixels
from benchmarks.yardsticks.train_miniqwen import shrink_size
from benchmarks.yardsticks.yardstick import (
    ALL_TOKENS,
    FULL,
    ORACLE,
    RANDOM,
    RESIZED,
    Case,
    Yardstick,
    batches,
    keep_tokens,
)
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

QWEN = CHECKPOINTS["miniqwen"]


@pytest.fixture(scope="module")
def llava() -> MiniLlava:
    return MiniLlava()


@pytest.fixture(scope="module")
def qwen() -> MiniQwen:
    return MiniQwen()


@pytest.fixture(scope="module")
def scene_examples() -> list[Example]:
    return draw_examples("validation", 2)[:24]


@pytest.fixture(scope="module")
def page_examples() -> list[Example]:
    return [e for e in draw_examples("search", 2, "miniqwen") if e.image_id == 1]


@pytest.fixture(scope="module")
def tokens(llava: MiniLlava, scene_examples: list[Example]) -> VisualTokens:
    return llava.encode(scene_examples).tokens


def test_weights_bear_the_names_of_the_hub_in_bfloat16() -> None:
    files = [path for folder in CHECKPOINTS.values() for path in folder.rglob("*")]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 25e6
    tensors, clip = (load_file(folder / "model.safetensors") for folder in (LLAVA, CLIP))
    qwen = load_file(QWEN / "model.safetensors")
    prefixes = ("vision_tower.vision_model.", "multi_modal_projector.", "language_model.")
    assert all(name.startswith(prefixes) for name in tensors)
    assert "language_model.model.layers.5.self_attn.q_proj.weight" in tensors
    assert "model.visual.deepstack_merger_list.1.linear_fc2.weight" in qwen
    assert {part.dtype for part in (*tensors.values(), *qwen.values())} == {torch.bfloat16}
    shared = [name for name in clip if name.startswith("vision_model.")]
    assert len(shared) > 80
    assert all(torch.equal(clip[name], tensors[f"vision_tower.{name}"]) for name in shared)
    config = AutoConfig.from_pretrained(QWEN)
    assert config.architectures == ["Qwen3VLForConditionalGeneration"]
    assert config.tie_word_embeddings and "lm_head.weight" not in qwen


def test_the_text_tower_states_its_sign_and_pools_on_the_end_token() -> None:
    clip, tokenizer = CLIPModel.from_pretrained(CLIP), AutoTokenizer.from_pretrained(CLIP)
    ids = tokenizer("Is there a red square in the picture?").input_ids
    assert clip.config.autoprune_relevance_sign == 1
    assert clip.config.text_config.eos_token_id == tokenizer.eos_token_id == ids[-1]
    assert tokenizer.eos_token_id not in ids[:-1]


def test_processors_and_chat_templates_make_the_prompts_of_training() -> None:
    example = draw_examples("test", 1)[0]
    content = [{"type": "image"}, {"type": "text", "text": example.question}]
    chat = [{"role": "user", "content": content}]
    processor, other = AutoProcessor.from_pretrained(LLAVA), AutoProcessor.from_pretrained(QWEN)
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=example.image, text=text, return_tensors="pt")
    assert text == format_prompt(example.question)
    assert int((inputs.input_ids == processor.image_token_id).sum()) == PATCHES
    expected = normalize_pixels(example.image[None]).float()
    assert torch.allclose(inputs.pixel_values.float(), expected, atol=0.02)
    text = other.apply_chat_template(chat, add_generation_prompt=True)
    assert text == format_prompt(example.question, "miniqwen")
    # An answer in a request has the tokens of training.
    user = {"role": "user", "content": [{"type": "text", "text": "What number is next to bird?"}]}
    for answer in ("13", " 13"):
        messages = [user, {"role": "assistant", "content": answer}]
        text = other.apply_chat_template(messages, continue_final_message=True)
        ids = other.tokenizer(text, add_special_tokens=False).input_ids
        assert ids[-2:] == other.tokenizer(" 13", add_special_tokens=False).input_ids


def test_any_image_size_runs() -> None:
    model = AutoModelForImageTextToText.from_pretrained(QWEN, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(QWEN)
    image = torch.zeros(3, 100, 210, dtype=torch.uint8)
    prompt = format_prompt("What is there?", "miniqwen")
    inputs = processor(text=[prompt], images=[image], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 16]]
    output = model.generate(**inputs, do_sample=False, max_new_tokens=2)
    assert output.shape[1] <= inputs["input_ids"].shape[1] + 2


def test_all_tokens_answer_right_and_fewer_do_not(llava: MiniLlava, qwen: MiniQwen) -> None:
    def accuracy(yardstick: Yardstick, examples: list[Example], case: Case) -> float:
        scores = [yardstick.encode(batch).score(case) for batch in batches(yardstick, examples)]
        return float(torch.cat([score.right for score in scores]).float().mean())

    full, (half, _, eighth, _) = Case(FULL, ALL_TOKENS, FULL), MiniQwen.budgets
    assert accuracy(llava, draw_examples("validation", 3), full) >= 0.9
    examples = draw_examples("test", 16, "miniqwen")
    cases = {
        "full": full,
        "half": Case(RESIZED, half, RESIZED),
        "eighth": Case(RESIZED, eighth, RESIZED),
        "random": Case(RANDOM, eighth, RANDOM),
        "oracle": Case(ORACLE, eighth, ORACLE),
    }
    share = {name: accuracy(qwen, examples, case) for name, case in cases.items()}
    assert min(share["full"], share["oracle"]) > 0.8
    assert share["half"] > share["random"]
    assert max(share["eighth"], share["random"]) < share["full"] - 0.2


def test_full_tokens_give_the_logits_of_the_whole_llava(
    llava: MiniLlava, scene_examples: list[Example], tokens: VisualTokens
) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(
        LLAVA, dtype=torch.bfloat16, attn_implementation="eager"
    )
    example, tokenizer = scene_examples[0], llava.tokenizer
    scores = llava.score_answers([example], tokens.features[:1])
    prompt = format_prompt(example.question).replace("<image>", "<image>" * PATCHES)
    text = f"{prompt} {example.answer}"
    ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
    pixels = normalize_pixels(example.image[None])
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=pixels).logits.float()
    answer = len(tokenizer(f" {example.answer}").input_ids) + 1
    expected = logits[0, :-1].log_softmax(-1)[-answer:].gather(1, ids[0, -answer:, None]).sum()
    assert float(scores.logprob[0]) == pytest.approx(float(expected), abs=0.05)


def test_the_prefix_is_what_the_language_model_computes(tokens: VisualTokens) -> None:
    served = tokens.require_language()
    embeds = served.embeddings().float()
    model = MiniLlava().llava.model.language_model.float()
    prefix = LlamaPrefix(model, embeds, served.start, served.text)
    output = model(
        inputs_embeds=embeds, output_hidden_states=True, output_attentions=True, use_cache=False
    )
    last, rows = prefix.layers - 1, prefix.text.shape[1]
    torch.testing.assert_close(prefix.states(0), output.hidden_states[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(prefix.normed(last), output.last_hidden_state, atol=1e-2, rtol=1e-3)
    for layer in (0, last):
        attention = output.attentions[layer][:, :, -rows:]
        torch.testing.assert_close(prefix.attention(layer), attention, atol=1e-3, rtol=1e-3)
    assert torch.equal(embeds[:, prefix.start : prefix.start + PATCHES], tokens.features.float())
    assert prefix.keys(1).shape[2] == embeds.shape[1]


def test_controls_keep_distinct_tokens_and_the_oracle_the_evidence(
    scene_examples: list[Example],
) -> None:
    oracle = keep_tokens(scene_examples, PATCHES, 12, ORACLE).tolist()
    blind = keep_tokens(scene_examples, PATCHES, 12, RANDOM)
    evidence = [set(example.evidence) for example in scene_examples]
    for example, row in zip(scene_examples, oracle, strict=True):
        assert set(example.evidence[:12]) <= set(row)
        assert row == sorted(set(row)) and len(row) == 12
    assert not all(e <= set(row) for e, row in zip(evidence, blind.tolist(), strict=True))
    assert blind.equal(keep_tokens(scene_examples, PATCHES, 12, RANDOM))


@torch.no_grad()
@pytest.mark.parametrize("divisor", [1, 4])
def test_answers_score_as_in_the_whole_qwen(page_examples: list[Example], divisor: int) -> None:
    qwen, image = MiniQwen(), page_examples[0].image
    qwen.qwen.float()
    budget = image_size(image).tokens // divisor
    encoded = qwen.encode_image(image, budget)
    assert encoded.size == shrink_size(image_size(image), budget)
    scores = qwen.score_answers(page_examples, encoded)
    for example, logprob in zip(page_examples, scores.logprob.tolist(), strict=True):
        limits = {"shortest_edge": TOKEN**2, "longest_edge": budget * TOKEN**2}
        inputs = qwen.processor(
            text=[f"{format_prompt(example.question, 'miniqwen')} {example.answer}<|im_end|>"],
            images=[as_picture(image)],
            images_kwargs={"size": limits},
            return_tensors="pt",
        )
        answer = f" {example.answer}<|im_end|>"
        expected = qwen.processor.tokenizer(answer, return_tensors="pt").input_ids[0]
        rows = qwen.qwen(**inputs).logits[0, -len(expected) - 1 : -1].log_softmax(-1)
        logprob_alone = float(rows.gather(1, expected[:, None]).sum())
        assert logprob == pytest.approx(logprob_alone, abs=0.01)


def test_kept_tokens_and_their_rows_take_the_place_of_the_image(
    qwen: MiniQwen, page_examples: list[Example]
) -> None:
    image = qwen.encode_image(page_examples[0].image)
    every = torch.arange(image.size.tokens).expand(len(page_examples), -1)
    full = qwen.score_answers(page_examples, image).logprob
    assert torch.equal(qwen.score_answers(page_examples, image, every).logprob, full)
    kept = every[:, ::3]
    some = qwen.score_answers(page_examples, image, kept).logprob
    same = qwen.score_answers(page_examples, image, kept, image.rows[kept]).logprob
    other = qwen.score_answers(page_examples, image, kept, image.rows[kept] * 0.5).logprob
    assert not torch.allclose(some, full)
    assert torch.equal(some, same) and not torch.equal(some, other)


def test_an_image_has_the_attention_and_the_merger_input_of_its_patches(
    qwen: MiniQwen, page_examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over a token's patches: of the last layer, of its output, of an early one's norms."""
    probabilities: list[Tensor] = []
    states: list[Tensor] = []
    attend = modeling_qwen3_vl.eager_attention_forward

    def record(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        output, weights = attend(*args, **kwargs)
        probabilities.append(weights)
        return output, weights

    monkeypatch.setattr(modeling_qwen3_vl, "eager_attention_forward", record)
    tower = qwen.qwen.model.visual
    hooks = [
        block.register_forward_hook(lambda _, args, output: states.append(output.float()))
        for block in tower.blocks
    ]
    image = qwen.encode_image(page_examples[0].image)
    for hook in hooks:
        hook.remove()
    expected = probabilities[-1][0].float().mean((0, 1)).view(-1, 4).mean(1)
    assert image.attention.shape == (image_size(page_examples[0].image).tokens,)
    assert torch.allclose(image.attention, expected, atol=1e-3)
    assert image.attention.sum() == pytest.approx(0.25, abs=1e-3)
    patches = states[-1].unflatten(0, (-1, 4))
    assert torch.allclose(image.encoder, patches.mean(1), atol=1e-4)
    patches = states[tower.config.deepstack_visual_indexes[0]].unflatten(0, (-1, 4))
    norms = torch.stack((patches.abs().sum(2), patches.norm(dim=2)), 2).mean(1)
    assert torch.allclose(image.merger_norms, norms, rtol=1e-4)


def test_each_question_has_relevance_and_words_of_its_own(
    qwen: MiniQwen, page_examples: list[Example]
) -> None:
    tokens = qwen.encode(page_examples).tokens
    assert tokens.batch == len(page_examples) and tokens.instruction is not None
    embed, tokenizer = qwen.qwen.get_input_embeddings(), qwen.processor.tokenizer
    ids = tokenizer(page_examples[2].question, add_special_tokens=False).input_ids
    mean = embed(torch.tensor(ids)).float().mean(0)
    assert torch.allclose(tokens.instruction.text[2, 0], mean)
    kept = refine(materialize(load_state("cdpruner"), 9), tokens).indices
    assert len({tuple(row) for row in kept.tolist()}) > 1
    blind = refine(materialize(load_state("divprune"), 9), tokens).indices
    assert len({tuple(row) for row in blind.tolist()}) == 1
