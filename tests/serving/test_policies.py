"""Every base policy and every shipped state on a real engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.yardsticks.examples import Example
from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    TOKENS,
    Answer,
    Watch,
    alone,
    breaking,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    release,
    start,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune import Grid, Instruction, PruningPolicy, VisualTokens, materialize, refine
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS, RefinedTokens
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


SMALL = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64}


@scenario
def base_policies() -> Report:
    """Prompt lengths and kept tokens of each base policy at two budgets, and transformers' tokens.

    Requests to one engine bring the policies, because starting an engine for each takes as long as
    all requests. ``full`` has the prompt lengths of a server without a state.
    """
    questions = examples(2)
    llm = start(None, **SMALL)
    report: dict[str, Any] = {
        "full": [generate(llm, [prompt(e)])[0].prompt_tokens for e in questions],
        "policies": {},
    }
    release(llm)
    llm = start({**STATE, "requests": "states"}, **SMALL)
    offline, seen = Offline(), watch()
    for name in BASE_POLICIES:
        forget(llm)
        report["policies"][name] = _served(llm, name, offline, seen)
    return report


def _served(llm: LLM, name: str, offline: Offline, seen: Watch) -> Report:
    state = load_state(json.dumps(alone(name)))
    meter = model_of(llm).autoprune_reporter.meter
    before, errors = meter.counts(), Counter(meter.errors)
    report: dict[str, Any] = {}
    for budget in (8, 16):
        seen.kept.clear()
        policy = materialize(state, budget)
        report[str(budget)] = [_beside(llm, offline, policy, seen, e) for e in examples(2)]
    report["fallbacks"] = _increase(before, meter.counts())
    report["errors"] = dict(Counter(meter.errors) - errors)
    report["alone"] = {str(plan): kept for plan, kept in seen.kept.items()}
    report["together"] = _together(llm, name, seen)
    report["survived"] = _survived(llm, name)
    report["broken"] = _increase(before, meter.counts())
    report["errors_at_last"] = dict(Counter(meter.errors) - errors)
    return report


def _increase(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in after.items()}


def _prompt(
    name: str, example: Example, budget: int = 16, instruction: str | None = None
) -> dict[str, Any]:
    """An example as a raw prompt that brings a base policy."""
    raw: dict[str, Any] = prompt(example, budget, instruction)
    raw["mm_processor_kwargs"]["autoprune"]["state"] = alone(name)
    return raw


def _beside(
    llm: LLM, offline: Offline, policy: PruningPolicy, seen: Watch, example: Example
) -> Report:
    """One answer, its kept tokens, and the tokens that transformers keeps."""
    before = set(seen.kept)
    name = policy.state.base_policy.name
    answer = generate(llm, [_prompt(name, example, policy.budget)])[0]
    expected = offline.kept(policy, picture(example.image), example.question)
    case: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "text": answer.text,
        "offline": expected.indices[0].tolist(),
    }
    for plan in set(seen.kept) - before:  # none, where questions share what is kept
        apart = (seen.rows[plan] - expected.features[0]).abs().max()
        case |= {"kept": seen.kept[plan], "rows_apart": float(apart)}
    return case


def _together(llm: LLM, name: str, seen: Watch) -> Report:
    """Kept tokens of all examples in one batch, with empty caches."""
    forget(llm)
    seen.kept.clear()
    seen.budgets.clear()
    generate(llm, [_prompt(name, e) for e in examples(2)])
    kept = {str(plan): kept for plan, kept in seen.kept.items()}
    return {"kept": kept, "at_once": max(map(len, seen.budgets))}


def _survived(llm: LLM, name: str) -> Report:
    """Answers to a very long instruction, to an empty one, and with non-finite features."""
    example, other = examples(2)[0], examples(2)[-1]
    unseen = {"multi_modal_data": {"image": picture(example.image).rotate(9)}}
    document = generate(llm, [_prompt(name, example, instruction=" ".join(["red"] * 10_000))])[0]
    nothing = generate(llm, [_prompt(name, other, instruction="")])[0]
    broken = breaking(model_of(llm).multi_modal_projector, float("nan"))
    spoilt = generate(llm, [{**_prompt(name, example), **unseen}])[0]
    broken.remove()
    return [answer.plain() for answer in (document, nothing, spoilt)]


BOS = 1


class WholePrefix:
    """A ``LanguagePrefix`` from one forward pass of the whole language model."""

    start = 1

    def __init__(self, model: Any, image: Tensor, words: list[int]) -> None:
        words = words or [BOS]
        table = model.embed_tokens.weight
        self._sequence = torch.cat([table[[BOS]], image, table[words]])[None]
        self._norm = model.norm
        self._out = model(
            inputs_embeds=self._sequence, output_hidden_states=True, output_attentions=True
        )
        self.layers = len(model.layers)
        self.text = torch.ones(1, len(words), dtype=torch.bool)

    def embeddings(self) -> Tensor:
        return self._sequence

    def states(self, layer: int) -> Tensor:
        assert layer < self.layers - 1, "transformers shows the last layer normed"
        states: Tensor = self._out.hidden_states[layer + 1]
        return states

    def normed(self, layer: int) -> Tensor:
        normed: Tensor = self._norm(self.states(layer))
        return normed

    def keys(self, layer: int) -> Tensor:
        keys: Tensor = self._out.past_key_values.layers[layer].keys
        return keys

    def attention(self, layer: int) -> Tensor:
        rows: Tensor = self._out.attentions[layer][:, :, -self.text.shape[1] :]
        return rows


class Offline:
    """Both checkpoints, opened once."""

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(LLAVA)

    @cached_property
    def _model(self) -> Any:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration.from_pretrained(
            LLAVA, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @cached_property
    def _clip(self) -> Any:
        from transformers import CLIPModel

        return CLIPModel.from_pretrained(CLIP, dtype=torch.float32).eval()

    @cached_property
    def _clip_words(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(CLIP)

    @torch.no_grad()
    def kept(self, policy: PruningPolicy, image: Image.Image, question: str) -> RefinedTokens:
        """The policy's selection for one image and question."""
        return refine(policy, self.tokens(image, question))

    @torch.no_grad()
    def tokens(self, image: Image.Image, question: str) -> VisualTokens:
        """Visual tokens with every optional input, B = 1."""
        model = self._model.model
        pixels = self._processor.image_processor(image, return_tensors="pt")["pixel_values"]
        tower = model.vision_tower
        seen = tower(pixels, output_hidden_states=True, output_attentions=True)
        states, before = seen.hidden_states[-2], seen.hidden_states[-3]
        layers = [m for n, m in tower.named_modules() if n.split(".")[-2:-1] == ["layers"]]
        read, following = layers[-2], layers[-1]
        heads = model.config.vision_config.num_attention_heads
        keys = read.self_attn.k_proj(read.layer_norm1(before)).unflatten(-1, (heads, -1))
        normed = following.layer_norm1(states)
        query, key = following.self_attn.q_proj(normed), following.self_attn.k_proj(normed)
        wide = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(dim=-1)
        projected = model.multi_modal_projector(states[:, 1:])
        side = int(projected.shape[1] ** 0.5)
        words = self._processor.tokenizer.encode(question, add_special_tokens=False)
        return VisualTokens(
            features=projected,
            grid=Grid(side, side),
            cls_attention=seen.attentions[-2].mean(dim=1)[:, 0, 1:],
            instruction=self._relevance(states[:, 1:], question),
            tower=TowerStates(
                patches=states[:, 1:],
                keys=keys.mean(dim=2)[:, 1:],
                project=model.multi_modal_projector,
                cls=states[:, :1],
                next_layer=NextLayer(wide[:, 0, 1:], key[:, 1:]),
            ),
            language=WholePrefix(model.language_model, projected[0], words),
            encoder=states[:, 1:],
            words=self._words(question),
        )

    def _words(self, question: str) -> Words:
        encode = self._processor.tokenizer.encode
        parts = split_content_words(question)
        ids = [token for part in parts for token in encode(part, add_special_tokens=False)]
        rows = self._model.get_input_embeddings()(torch.tensor([ids], dtype=torch.int64))
        return Words(rows, torch.ones(1, len(ids), dtype=torch.bool))

    def _relevance(self, patches: Tensor, question: str) -> Instruction:
        clip = self._clip
        words = self._clip_words(question, return_tensors="pt")
        text = clip.text_projection(clip.text_model(**words).pooler_output)
        tokens_in_clip = clip.visual_projection(clip.vision_model.post_layernorm(patches))
        one = torch.ones(1, 1, dtype=torch.bool)
        return Instruction(tokens_in_clip, text[:, None], one, read_text_tower(str(CLIP)).sign)


READ_THE_INSTRUCTION = {
    name
    for name, base in BASE_POLICIES.items()
    if base.needs_of(base.default_params) & INSTRUCTION_NEEDS
}


HALF = TOKENS // 2
"""What requests ask for where a state's own budget keeps every token of so small an image."""


@scenario
def shipped_by_request() -> Report:
    """Every shipped state, named by requests to one engine that runs another state."""
    llm = start(None, **SMALL)
    report: dict[str, Any] = {"full": _asked(llm, {}).plain(), "states": {}}
    release(llm)
    llm = start({**STATE, "state": "divprune", "requests": "states"}, **SMALL)
    meter = model_of(llm).autoprune_reporter.meter
    for name, file in shipped_states().items():
        own = materialize(load_state(file)).tokens_kept(TOKENS)
        forget(llm)  # names of one state share their cached rows
        before = meter.counts()
        entries: dict[int, dict[str, object]] = {own: {"state": name}}
        if own >= TOKENS:
            entries[HALF] = {"state": name, "budget": HALF}
        report["states"][name] = {
            "answers": {kept: _asked(llm, entry).plain() for kept, entry in entries.items()},
            "fallbacks": {kind: count - before[kind] for kind, count in meter.counts().items()},
            "errors": dict(meter.errors),
        }
    return report


def _asked(llm: Any, entry: dict[str, object]) -> Answer:
    raw = {**prompt(examples(1)[0]), "mm_processor_kwargs": {"autoprune": entry}}
    (answer,) = generate(llm, [raw])
    return answer


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_kept_tokens_of_a_base_policy_equal_those_of_transformers(
    runner: Runner, name: str
) -> None:
    """Equal tokens, and rows equal up to float32 rounding; each prompt is shorter by N - K.

    A policy that does not read the instruction selects once an image: later questions find the
    rows in vLLM's caches.
    """
    everything = runner.run("base_policies")
    report = everything["policies"][name]
    for budget in (8, 16):
        cases = report[str(budget)]
        for full, case in zip(everything["full"], cases, strict=True):
            assert case["prompt_tokens"] == full - (TOKENS - budget)
        selected = [case for case in cases if "kept" in case]
        images = 2
        assert len(selected) == (len(cases) if name in READ_THE_INSTRUCTION else images)
        for case in selected:
            assert case["kept"] == case["offline"]
            assert case["rows_apart"] < 1e-3
    assert report["errors"] == {}
    assert report["fallbacks"]["reference"] == report["fallbacks"]["uniform"] == 0
    assert report["fallbacks"]["none"] > 0


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_batched_and_single_questions_keep_the_same_tokens(runner: Runner, name: str) -> None:
    report = runner.run("base_policies")["policies"][name]
    together, alone = report["together"]["kept"], report["alone"]
    assert report["together"]["at_once"] > 1
    assert together
    assert together == {plan: alone[plan] for plan in together}


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_extreme_instructions_and_features_do_not_stop_a_base_policy(
    runner: Runner, name: str
) -> None:
    """10,000 words; no words; non-finite features, which give evenly spaced tokens."""
    report = runner.run("base_policies")
    policy, full = report["policies"][name], report["full"]
    for index, answer in zip((0, -1, 0), policy["survived"], strict=True):
        assert answer["prompt_tokens"] == full[index] - (TOKENS - 16)
    assert policy["broken"]["uniform"] == 1
    assert policy["errors_at_last"] == {}


@pytest.mark.parametrize("name", shipped_states())
def test_a_request_may_name_a_shipped_state(name: str) -> None:
    """K tokens at the state's own budget, no fallback and no error.

    A state that keeps all 144 tokens of this model's images is also run at 72.
    """
    report = Runner("v1").run("shipped_by_request")
    served, full = report["states"][name], report["full"]
    assert min(map(int, served["answers"])) < TOKENS
    for kept, answer in served["answers"].items():
        assert answer["prompt_tokens"] == full["prompt_tokens"] - TOKENS + min(int(kept), TOKENS)
        assert answer["text"]
    assert served["errors"] == {}
    assert served["fallbacks"]["reference"] == served["fallbacks"]["uniform"] == 0
    assert served["fallbacks"]["none"] > 0
