"""``python -m benchmarks.yardsticks.train_minillava``: train mini-LLaVA and its CLIP from scratch.

Shapes of the models, tokenizers and processors are those of the committed checkpoint. Relevance is
trained on the path that serving reads: penultimate patches, post layer norm and visual projection,
compared with the projected text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, LlamaForCausalLM, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from benchmarks.yardsticks import training
from benchmarks.yardsticks.examples import CLIP, IMAGE_TOKEN, LLAVA, PROMPT
from benchmarks.yardsticks.questions import BRIEF, KINDS, SEEN, SceneQuestions, with_article
from benchmarks.yardsticks.scenes import (
    CELL_PATCHES,
    CELLS,
    COLOURS,
    MAX_DIGITS,
    MAX_SHAPES,
    NEIGHBOURS,
    PATCHES,
    SHAPES,
    TRAINING_STYLES,
    Layout,
    Scene,
    Sign,
    Thing,
    draw_layout,
    normalize_pixels,
    render_characters,
    render_scenes,
)

STAGES = (
    training.Stage("reading", 300, 16, 2e-3, 50, 0.4),
    training.Stage("towers", 1500, 16, 2e-3, 100, 0.4),
    # The model continues with questions, so its rate does not fall at the end of this stage.
    training.Stage("phrases", 1200, 8, 4e-3, 100, 0.0),
    training.Stage("questions", 2400, 8, 4e-3, 100, 0.4),
)

# Scenes of the phrase stage start with two shapes in few tokens and are complete at this step.
_CURRICULUM_STEPS, _CURRICULUM_TOKENS = 700, 12
# At CLIP's scale of 0.02 the position table is drowned by the patches.
_POSITION_SCALE = 0.5
_PHRASES_PER_IMAGE = 3
# Logits of pointing over the patches are cosines times this.
_POINTING_SCALE = 16.0

# Relative frequencies; questions that take more than one look-up are asked more often.
_QUESTION_WEIGHTS = {
    "digit": 6, "colour": 4, "shape": 4, "text": 10, "count": 24, "quarter": 4, "relation": 14,
    "existence": 8, "reading": 12, "position": 5, "counting": 14,
}  # fmt: skip
# Counts are learnt last and therefore asked most. Halves are asked because columns, unlike rows, do
# not follow from the order of the tokens and were not learnt from quarters alone.
_PHRASE_WEIGHTS = {
    "digit": 8, "colour": 3, "shape": 3, "text": 5, "count": 14, "quarter": 3, "relation": 10,
    "existence": 5, "reading": 8, "position": 5, "counting": 10, training.NEIGHBOUR: 4,
    training.HALF: 6,
}  # fmt: skip
_EVERY_KIND = (*KINDS, *map(training.phrase_kind, (*KINDS, training.NEIGHBOUR, training.HALF)))
_BEFORE_IMAGE, _AFTER_IMAGE = PROMPT["minillava"].split(IMAGE_TOKEN["minillava"])

FIELDS: dict[str, int] = {
    "kind": 3, "colour": len(COLOURS), "shape": len(SHAPES), "digit": 10, "row": CELLS,
    "column": CELLS, "slot": MAX_DIGITS, "length": MAX_DIGITS - 1, "centre": 2,
    **{f"near{place} {name}": count + 1
       for place in range(len(NEIGHBOURS))
       for name, count in (("colour", len(COLOURS)), ("shape", len(SHAPES)))},
}  # fmt: skip
"""Fields of dense labels of patches, and their numbers of classes.

kind: 0 background, 1 shape, 2 sign; row and column in cells; slot: position within the number;
length: digits of the number minus two; centre: 1 on the middle patch of a shape, 0 on its others;
digit: on a sign's patches and on the middle patch of a shape only, so that no other patch learns to
repeat it; near: colour and form of the shapes on the left, on the right, above and below, the last
class where there is none.
"""
_FIELD_WEIGHTS = {name: 0.5 for name in FIELDS if name.startswith("near")} | {"digit": 2.0}


def build_models() -> tuple[
    CLIPModel, training.DenseHeads, LlavaMultiModalProjector, LlamaForCausalLM
]:
    """Untrained models; the position table starts as waves over rows and columns."""
    config = CLIPConfig.from_pretrained(CLIP, attn_implementation="eager")
    clip = CLIPModel(config)
    clip.vision_model.config._attn_implementation = "in_place"
    width = config.vision_config.hidden_size
    with torch.no_grad():
        table = clip.vision_model.embeddings.position_embedding.weight
        table[1:] = training.position_waves(CELLS * CELL_PATCHES, width) * _POSITION_SCALE
    heads, llava = training.DenseHeads(width, FIELDS), LlavaConfig.from_pretrained(LLAVA)
    language = llava.text_config
    language._attn_implementation = "in_place"
    return clip, heads, LlavaMultiModalProjector(llava), LlamaForCausalLM(language)


def _penultimate_states(clip: CLIPModel, values: Tensor) -> Tensor:
    """Hidden states (B, 1 + N, Dv) before the last layer, which LLaVA reads."""
    tower = clip.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(values))
    for layer in tower.encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


def draw_scenes(seed: int, size: int, max_shapes: int | None = None) -> tuple[Tensor, list[Scene]]:
    """Images (B, 3, H, W) and scenes in the arrangements of training.

    `max_shapes` makes them easier: each scene keeps at most so many shapes, and every second one
    on average has a single form or a single colour.
    """
    rng = random.Random(seed)
    layouts = [draw_layout(rng, rng.choice(TRAINING_STYLES)) for _ in range(size)]
    if max_shapes is not None:
        layouts = [replace(layout, things=layout.things[:max_shapes]) for layout in layouts]
        layouts = [
            _unify_names(rng, layout) if rng.random() < 0.5 else layout for layout in layouts
        ]
    return render_scenes(layouts, CELLS, seed)


def _unify_names(rng: random.Random, layout: Layout) -> Layout:
    """Give the first shapes of a layout one form, or one colour, and drop the others.

    Only the other word of a name then tells two shapes apart. Without such scenes a small model
    learns to find a shape by the last word of its name, is right half of the time, and stays there.
    """
    if rng.random() < 0.5:
        colours = rng.sample(range(len(COLOURS)), len(COLOURS))
        shape = rng.randrange(len(SHAPES))
        names = [(colour, shape) for colour in colours]
    else:
        colour = rng.randrange(len(COLOURS))
        names = [(colour, shape) for shape in rng.sample(range(len(SHAPES)), len(SHAPES))]
    things = tuple(
        replace(thing, colour=colour, shape=shape)
        for thing, (colour, shape) in zip(layout.things, names, strict=False)
    )
    return replace(layout, things=things)


def _label_patches(scenes: Sequence[Scene]) -> Tensor:
    """Labels (fields, B, N) of scenes."""
    labels = torch.full((len(FIELDS), len(scenes), PATCHES), training.UNLABELLED)
    labels[0] = 0
    for index, scene in enumerate(scenes):
        patches, columns = zip(*_scene_labels(scene), strict=True)
        labels[:, index, list(patches)] = torch.tensor(columns).T
    return labels


def _scene_labels(scene: Scene) -> Iterator[tuple[int, list[int]]]:
    """(raster patch, its labels) of all shapes and signs."""
    for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
        near: list[int] = []
        for step in NEIGHBOURS:
            other = scene.layout.neighbour(thing, *step)
            near += (other.colour, other.shape) if other else (len(COLOURS), len(SHAPES))
        for patch in patches:
            middle = patch == patches[0]
            digit = thing.digit if middle else training.UNLABELLED
            labels = [1, thing.colour, thing.shape, digit, thing.row, thing.column, -1, -1]
            yield patch, [*labels, int(middle), *near]
    for sign, patches in zip(scene.layout.signs, scene.sign_patches, strict=True):
        cell = (sign.row // CELL_PATCHES, sign.column // CELL_PATCHES)
        for slot, (patch, digit) in enumerate(zip(patches, sign.number, strict=True)):
            labels = [2, sign.colour, -1, digit, *cell, slot, len(sign.number) - 2, -1]
            yield patch, [*labels, *[-1] * 2 * len(NEIGHBOURS)]


def _reading_loss(
    clip: CLIPModel, heads: training.DenseHeads, seed: int, size: int
) -> training.Loss:
    """Loss of the reading stage: the digit and the colour of every patch of images of digits."""
    images, digit, colour = render_characters(seed, size)
    labels = torch.full((len(FIELDS), *digit.shape), training.UNLABELLED)
    labels[list(FIELDS).index("digit")], labels[list(FIELDS).index("colour")] = digit, colour
    patches = _penultimate_states(clip, normalize_pixels(images))[:, 1:]
    return heads.loss(patches, labels, {"colour": 0.3})


def _tower_loss(
    clip: CLIPModel, heads: training.DenseHeads, tokenizer: Tokenizer, seed: int, size: int
) -> training.Loss:
    """Loss of the tower stage: dense classes, pointing, and image-_caption contrast.

    The texts are B * P phrases, then B captions; the targets of pointing (B, P, N) spread a weight
    of one over the patches that each phrase names.
    """
    images, scenes = draw_scenes(seed, size)
    rng = random.Random(seed + 1)
    texts: list[str] = []
    targets = torch.zeros(size, _PHRASES_PER_IMAGE, PATCHES)
    for index, scene in enumerate(scenes):
        for row in range(_PHRASES_PER_IMAGE):
            phrase, named = _pointing_phrase(rng, scene)
            texts.append(phrase)
            targets[index, row, list(named)] = 1 / len(named)
    texts += [_caption(rng, scene) for scene in scenes]
    end, ids = clip.config.text_config.eos_token_id, tokenizer.encode_batch(texts)
    longest = max(len(encoding.ids) for encoding in ids)
    padded = torch.tensor([each.ids + [end] * (longest - len(each.ids)) for each in ids])

    hidden = _penultimate_states(clip, normalize_pixels(images))
    patches = hidden[:, 1:]
    dense, parts = heads.loss(patches, _label_patches(scenes), _FIELD_WEIGHTS)
    pooled = clip.text_model(input_ids=padded).pooler_output
    text = F.normalize(clip.text_projection(pooled).float(), dim=-1)
    projected = clip.visual_projection(clip.vision_model.post_layernorm(patches))
    projected = F.normalize(projected.float(), dim=-1)
    phrases = text[: size * _PHRASES_PER_IMAGE].view(size, _PHRASES_PER_IMAGE, -1)
    cosines = phrases @ projected.transpose(1, 2)
    pointing = -(targets * F.log_softmax(cosines * _POINTING_SCALE, -1)).sum(-1).mean()

    # CLIP's symmetric contrastive loss between images and captions.
    last = clip.vision_model.encoder.layers[-1](hidden, attention_mask=None)[:, 0]
    image = clip.visual_projection(clip.vision_model.post_layernorm(last))
    scale = clip.logit_scale.float().exp().clamp(max=50)
    logits, same = scale * F.normalize(image.float(), dim=-1) @ text[-size:].T, torch.arange(size)
    contrast = F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)
    loss = dense + 0.5 * pointing + 0.1 * contrast
    hit = targets.gather(2, cosines.argmax(-1, keepdim=True)) > 0
    totals = {"loss": float(loss.detach()), "contrast": float(contrast.detach())}
    return loss, totals | parts | {"hit": float(hit.float().mean())}


def _pointing_phrase(rng: random.Random, scene: Scene) -> tuple[str, tuple[int, ...]]:
    """Draw a phrase that names one part of a scene, with the patches of that part.

    The text tower is trained on such phrases and never on questions, so its relevance to a whole
    question is good but not perfect, as in a real model.
    """
    layout = scene.layout
    if layout.signs and rng.random() < 0.2:
        sign = rng.choice(layout.signs)
        return f"the {sign.name}", scene.patches(sign)
    thing = rng.choice(layout.things)
    digits = [other.digit for other in layout.things]
    if digits.count(thing.digit) == 1 and rng.random() < 0.35:
        return f"the digit {thing.digit}", scene.patches(thing)
    names = (thing.name, with_article(thing.name), f"the {thing.name}")
    return rng.choice(names), scene.patches(thing)


def _caption(rng: random.Random, scene: Scene) -> str:
    """Describe three random parts of the scene, for the contrastive loss between images."""
    candidates: tuple[Thing | Sign, ...] = (*scene.layout.things, *scene.layout.signs)
    parts = rng.sample(candidates, 3)
    return ", ".join(
        f"{part.name} {part.text if isinstance(part, Sign) else part.digit}" for part in parts
    )


def draw_batch(
    seed: int, size: int, words: Tokenizer, max_shapes: int | None = None, budget: int = PATCHES
) -> tuple[Tensor, Tensor, training.TextBatch]:
    """Pixels, raster patches (B, K) that are kept, and texts of one batch.

    Questions and phrases are asked; with `max_shapes` phrases only, about easier scenes, whose
    first `budget` patches are shapes' middles and whole signs. Phrases go on beside the questions,
    for what they have not taught yet and against forgetting.
    """
    images, scenes = draw_scenes(seed, size, max_shapes)
    rng = random.Random(seed + 1)
    pictures, kept = [], []
    for scene in scenes:
        phrases = SceneQuestions(rng, scene, (CELLS, CELLS), BRIEF)
        texts, number, chosen = [], 40, list(range(budget))
        if max_shapes is None:
            questions = training.draw_texts(
                replace(phrases, wordings=SEEN), _QUESTION_WEIGHTS, 12, False
            )
            texts += [(_AFTER_IMAGE.format(question=each.text), each) for each in questions]
            number = 14
        drawn = training.draw_texts(phrases, _PHRASE_WEIGHTS, number, True)
        texts += [(f" {each.text}", each) for each in drawn]
        if max_shapes is not None:
            shown = [patches[0] for patches in scene.thing_patches]
            shown += [patch for patches in scene.sign_patches for patch in patches]
            chosen = training.keep_shown_tokens(rng, shown, budget, PATCHES)
        kept.append(chosen)
        pictures.append(texts)
    start = len(words.encode(_BEFORE_IMAGE).ids) + budget
    batch = training.build_texts(words, pictures, start, "</s>", "<pad>", _EVERY_KIND)
    return normalize_pixels(images), torch.tensor(kept), batch


def language_loss(
    model: LlamaForCausalLM,
    projector: nn.Module,
    patches: Tensor,
    kept: Tensor,
    before: Tensor,
    texts: training.TextBatch,
) -> training.Loss:
    """Cross entropy on answer tokens; `patches` (B, N, Dv) come from the frozen tower.

    Sequences begin with the ids `before` (P,) and the image tokens `kept` (B, K).
    """
    count, prefix = len(kept), len(before) + kept.shape[1]
    embed = model.get_input_embeddings()
    image = projector(patches[torch.arange(count)[:, None], kept])
    embeds = (embed(before).expand(count, -1, -1), image, embed(texts.texts))
    positions = torch.arange(prefix).expand(count, prefix)
    hidden = model.model(
        inputs_embeds=torch.cat(embeds, 1),
        attention_mask=texts.mask(prefix, torch.bfloat16),
        position_ids=torch.cat((positions, texts.positions), 1),
        use_cache=False,
    ).last_hidden_state
    return texts.loss(model.lm_head, hidden[:, prefix:], _EVERY_KIND)


def train_rank(rank: int, run: training.Run) -> None:
    """Train all stages as one of the ranks."""
    training.join_ranks(run, rank)
    clip_words, words = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (CLIP, LLAVA)
    )
    clip, heads, projector, model = build_models()
    reading, towers, phrases, questions = run.stages
    lead = torch.tensor(words.encode(_BEFORE_IMAGE).ids)

    def answer_loss(values: Tensor, kept: Tensor, texts: training.TextBatch) -> training.Loss:
        with torch.no_grad():
            patches = _penultimate_states(clip, values)[:, 1:]
        return language_loss(model, projector, patches, kept, lead, texts)

    def phrase_loss(seed: int, step: int) -> training.Loss:
        # A low rate at first: among many tokens, attention joins the words of a name only slowly.
        progress = min(1.0, step / (_CURRICULUM_STEPS * run.steps_scale)) ** 2
        shapes = 2 + round((MAX_SHAPES - 2) * progress)
        budget = _CURRICULUM_TOKENS + round((PATCHES - _CURRICULUM_TOKENS) * progress)
        return answer_loss(*draw_batch(seed, phrases.images, words, shapes, budget))

    vision: dict[str, nn.Module] = {"clip": clip, "heads": heads}
    language: dict[str, nn.Module] = {"projector": projector, "model": model}
    training.run_stage(
        run, 0, vision, lambda seed, _: _reading_loss(clip, heads, seed, reading.images)
    )
    training.run_stage(
        run, 1, vision, lambda seed, _: _tower_loss(clip, heads, clip_words, seed, towers.images)
    )
    clip.requires_grad_(False)
    training.run_stage(run, 2, language, phrase_loss)
    training.run_stage(
        run, 3, language, lambda seed, _: answer_loss(*draw_batch(seed, questions.images, words))
    )
    if rank == 0:
        training.write_checkpoint(run.out / "clip", CLIP, clip.state_dict())
        parts = {
            "vision_tower.vision_model.": clip.vision_model,
            "multi_modal_projector.": projector,
            "language_model.": model,
        }
        tensors = {
            prefix + name: value
            for prefix, module in parts.items()
            for name, value in module.state_dict().items()
        }
        training.write_checkpoint(run.out / "llava", LLAVA, tensors)
        training.log(f"wrote {run.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    training.start("Train mini-LLaVA and its CLIP from scratch.", STAGES, train_rank)
