"""A tiny model in an engine of this process, asked questions and observed while it answers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.errors import RequestError
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.selftest.backbones import WIDTH
from vllm_autoprune.selftest.checks import BLOCK, RECALL, SMALL_BUDGET, SPLIT_QUESTION
from vllm_autoprune.selftest.run import Completion
from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.regions import SelectionContext


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A picture of coloured blocks."""
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((width, height))


_WIDE, _TALL = picture(200, 112, 1), picture(96, 208, 2)
QUESTIONS: Mapping[str, tuple[str, tuple[Image.Image, ...]]] = {
    "square": ("what colour is the cat", (picture(112, 112, 0),)),
    "wide": ("what colour is the cat", (_WIDE,)),
    "high": ("what colour is the cat", (_TALL,)),
    "large": ("what colour is the cat", (picture(330, 300, 4),)),
    "two": ("how many are there", (_TALL, picture(120, 96, 3))),
    "other question": ("which dog is on the left", (_WIDE,)),
}
QUESTIONS_WITH_BUDGETS: Mapping[str, tuple[str, tuple[Image.Image, ...], Sequence[int]]] = {
    "two at once": (*QUESTIONS["two"], (SMALL_BUDGET, SMALL_BUDGET)),
    "one pruned, one whole": (
        QUESTIONS["two"][0],
        (picture(96, 96, 5), _WIDE),
        (SMALL_BUDGET, 4096),
    ),
    "first": (*QUESTIONS["high"], (SMALL_BUDGET,)),
    "second": (*QUESTIONS["wide"], (SMALL_BUDGET,)),
}
"""Requests whose images all have the same `uuid`; each image has a budget."""
SECOND = ("which dog is on the left", QUESTIONS[SPLIT_QUESTION][1])
"""Another question about the same image."""

FURTHER = ("how many are there", QUESTIONS[SPLIT_QUESTION][1])
"""A third question about it."""

PADDING = " and the sky is blue on the right" * 6
"""Added to every question, so that image and text fill a block of the prefix cache."""


class _EngineObserver:
    """Positions that the language model receives, kept rows and features of images."""

    def __init__(self, layer: nn.Module) -> None:
        """``layer`` is the language model's first: vLLM calls the model without its hooks."""
        self._positions: list[Tensor] = []
        self.features: list[ImageFeatures] = []

        def record(layer: nn.Module, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
            positions = named["positions"] if "positions" in named else inputs[0]
            self._positions.append(positions.clone())

        layer.register_forward_pre_hook(record, with_kwargs=True)

    def take_positions(self, length: int, last: bool = False) -> list[list[int]]:
        """Take positions of the first or last ``length`` tokens, one row for each axis."""
        joined = torch.cat(self._positions, dim=-1)
        self._positions.clear()
        axes = joined.reshape(-1, joined.shape[-1])
        return [list(map(int, row)) for row in (axes[:, -length:] if last else axes[:, :length])]

    @contextmanager
    def recording_rows(self) -> Iterator[list[list[int]]]:
        """Record the features of images; yields which of its unpruned rows each row of one is."""
        kept: list[list[int]] = []

        def prune_and_record(
            context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
        ) -> list[Tensor]:
            selected = prune_images(context, plans, images)
            for image, rows in zip(images, selected, strict=True):
                equal = (rows[:, None] == image.rows()[None]).all(dim=2).to(torch.int8)
                place = torch.where(equal.any(dim=1), equal.argmax(dim=1), -1)
                kept.append(place.tolist())
                self.features.append(image)
            return selected

        with patch.object(pruned_model, "prune_images", prune_and_record):
            yield kept


STEPS_BETWEEN_PREEMPTIONS = 11
"""A prompt takes 6 to 9 steps and decoding 3 more, so that the first request is preempted while it
is decoded and the second while it is prefilled. A longer prompt needs more steps to be answered."""


class TinyEngine:
    """One engine; ``observer`` has what it does, ``llm`` is ``vllm.LLM``."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None, **options: object
    ) -> None:
        """Start it, with a state unless ``settings`` is None."""
        from vllm import LLM

        more = {} if settings is None else {"additional_config": {"autoprune": dict(settings)}}
        # vLLM's linear attention on a CPU takes bfloat16 only (cpu_gdn_attention_core).
        linear = "linear_attention" in (folder / "config.json").read_text()
        self.llm: Any = LLM(
            model=str(folder),
            enforce_eager=True,
            dtype="bfloat16" if linear else choose_dtype(),
            max_model_len=1024,
            block_size=BLOCK,
            num_gpu_blocks_override=128,
            limit_mm_per_prompt={"image": 4},
            enable_mm_embeds=True,
            **more,
            **options,
        )
        language_model = self.model.get_language_model()
        # Idefics3's has no head around it.
        layers = getattr(language_model, "model", language_model).layers
        self.observer = _EngineObserver(layers[0])

    @property
    def model(self) -> Any:
        """The served model."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    @property
    def processor(self) -> Any:
        """A multi-modal processor of the model."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.create_processor(self.llm.llm_engine.model_config)

    @property
    def splittable(self) -> bool:
        """Whether images of the model can be several items of a prompt."""
        return not self.processor._placeholders.unsplittable

    def stop(self) -> None:
        """End it, so that another one can start."""
        self.llm.llm_engine.engine_core.shutdown()
        # vLLM collects garbage several times a start, and each time walks all that was imported.
        gc.freeze()

    def empty_caches(self) -> None:
        """Empty vLLM's caches, and with them the plugin's."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    @contextmanager
    def preempting(self, interval: int = STEPS_BETWEEN_PREEMPTIONS) -> Iterator[None]:
        """Preempt running requests every ``interval`` steps, during prefill and during decoding."""
        engine = self.llm.llm_engine
        step, steps = engine.step, itertools.count(1)

        def step_with_preemption() -> Any:
            if next(steps) % interval == 0:
                engine.reset_prefix_cache(reset_running_requests=True)
            return step()

        with patch.object(engine, "step", step_with_preemption):
            yield

    def predict_tokens(self) -> dict[str, list[int]]:
        """N of every image, computed from its size before any model runs."""
        from vllm.multimodal.parse import ImageSize

        processor = self.processor
        count = processor._placeholders.count
        return {
            name: [count(processor.info, ImageSize(*image.size), {}).tokens for image in images]
            for name, (_, images) in QUESTIONS.items()
        }

    def ask(self, name: str, budget: int | None = None, preempted: bool = False) -> Completion:
        """The completion of one of the questions."""
        return self.complete(*QUESTIONS[name], budget, preempted)

    def complete(
        self,
        text: str,
        images: Sequence[Image.Image],
        budget: int | Sequence[int] | None,
        preempted: bool = False,
        uuid: str | None = None,
    ) -> Completion:
        """The completion of a text about images, each sent under the name ``uuid``."""
        named = {} if uuid is None else {"uuid": uuid}
        parts: list[dict[str, object]] = [
            {"type": "image_pil", "image_pil": image, **named} for image in images
        ]
        content = [*parts, {"type": "text", "text": text + PADDING}]
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        requested = budget if budget is None or isinstance(budget, int) else list(budget)
        return self._chat(messages, {} if budget is None else {"budget": requested}, preempted)

    def refuses_recall(self) -> bool:
        """Whether a conversation is refused whose later turns are to recall tokens."""
        try:
            self.converse({"recall": RECALL})
        except RequestError:
            return True
        return False

    def converse(
        self, fields: Mapping[str, object] | None = None, preempted: bool = False
    ) -> Completion:
        """The completion of a third turn.

        The second and the third turn recall tokens where the model can; ``fields`` are the
        request's in place of that.
        """
        if fields is None:
            fields = {"recall": RECALL} if self.splittable else {}
        text, (image,) = QUESTIONS[SPLIT_QUESTION]
        parts = [
            {"type": "image_pil", "image_pil": image},
            {"type": "text", "text": text + PADDING},
        ]
        messages: list[dict[str, object]] = [{"role": "user", "content": parts}]
        for later in ("which dog is on the left", "how many are there"):
            messages += [
                {"role": "assistant", "content": "blue"},
                {"role": "user", "content": later},
            ]
        return self._chat(messages, fields, preempted)

    def ask_unpruned(self) -> dict[str, Completion]:
        """Completions about a video and about embeddings of 12 tokens, where the model takes them.

        The video has four frames.
        """
        info = self.processor.info
        completions = {}
        if "video" in info.get_supported_mm_limits():
            frames = numpy.stack([numpy.asarray(picture(56, 84, seed)) for seed in range(4)])
            metadata = {
                "fps": 2.0,
                "duration": 2.0,
                "total_num_frames": 4,
                "frames_indices": [0, 1, 2, 3],
                "video_backend": "opencv",
                "do_sample_frames": False,
            }
            completions["video"] = self._ask_about("video", (frames, metadata))
        visual = getattr(self.model, "visual", None)
        width = WIDTH if visual is None else visual.out_hidden_size
        noise = torch.Generator().manual_seed(0)
        rows = torch.randn(12, int(width), generator=noise).to(torch.bfloat16)
        image: object = rows[None]
        if "image" in info.get_data_parser().embedding_fields:
            image = {"image_embeds": rows, "image_grid_thw": torch.tensor([[1, 4, 12]])}
        with suppress(TypeError, ValueError):  # refused by models that take no embeddings
            completions["embeddings"] = self._ask_about("image", image)
        return completions

    def _ask_about(self, modality: str, data: object) -> Completion:
        """The completion about one input, written as its placeholder."""
        placeholder = type(self.model).get_placeholder_str(modality, 0)
        prompt = {
            "prompt": f"user {placeholder} what is on the left you",
            "multi_modal_data": {modality: data},
        }
        (output,) = self.llm.generate([prompt], _sampling(), use_tqdm=False)
        return self._completion(output)

    def _chat(
        self, messages: list[dict[str, object]], entry: Mapping[str, object], preempted: bool
    ) -> Completion:
        options = {"mm_processor_kwargs": {"autoprune": dict(entry)}} if entry else {}
        (output,) = self.llm.chat([messages], _sampling(), use_tqdm=False, **options)
        return self._completion(output, preempted)

    def _completion(self, output: Any, preempted: bool = False) -> Completion:
        generated = output.outputs[0]
        cached = 0 if preempted else output.num_cached_tokens or 0
        prompt, ids = list(output.prompt_token_ids), list(generated.token_ids)
        computed = len(prompt) + len(ids) - 1 - cached
        return Completion(
            prompt=prompt,
            ids=ids,
            logprob=float(generated.cumulative_logprob),
            cached=cached,
            positions=self.observer.take_positions(computed, last=preempted),
        )


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
