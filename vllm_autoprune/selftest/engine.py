"""An engine in this process, asked and observed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn

from vllm_autoprune.backbones import read_config
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.selftest.questions import PADDING, Question, video
from vllm_autoprune.selftest.run import BLOCK, Completion, Completions, Rows
from vllm_autoprune.serving.models import BACKBONES, pruned_model
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.rows import count_channels

STEPS_BETWEEN_PREEMPTIONS = 11
"""Engine steps between preemptions. A prompt takes 6 to 9 steps and decoding 3 more, so the first
request is preempted while it is decoded and the second while it is prefilled. A longer prompt needs
more steps to be answered."""


@cache
def mend_products() -> None:
    """Let vLLM's product of matrices on a CPU take rows of any stride.

    Why: the tower of Step3-VL returns a transposed view, and a single image of it is refused, with
    or without a state.
    Remove when: ``vllm._custom_ops.onednn_mm`` takes it.
    """
    from vllm import _custom_ops

    multiply = _custom_ops.onednn_mm

    def multiply_rows(handler: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = multiply(handler, rows.contiguous(), bias)
        return product

    vars(_custom_ops)["onednn_mm"] = multiply_rows


class Engine:
    """A ``vllm.LLM``; with one rank its worker is in this process."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None, **options: Any
    ) -> None:
        """Start the engine, with a state unless ``settings`` is None."""
        from vllm import LLM

        mend_products()
        if is_normalized_before(folder):
            options["mm_device_do_normalize"] = False
        if settings is not None:
            options["additional_config"] = {"autoprune": dict(settings)}
        usual = {"enforce_eager": True, "dtype": choose_dtype(), "block_size": BLOCK}
        self.llm: Any = LLM(model=str(folder), **{**usual, **options})

    @property
    def runner(self) -> Any:
        """The model runner."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> Any:
        """The model object."""
        return self.runner.model

    @property
    def runs(self) -> int:
        """Number of times that the vision tower has run so far, each on one image or several."""
        return int(self.model.autoprune.runs)

    def empty_caches(self) -> None:
        """Empty vLLM's caches, which empties the plugin's too."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def stop(self) -> None:
        """End the engine, so that this process can start another one."""
        self.llm.llm_engine.engine_core.shutdown()
        # vLLM collects garbage several times during a start, which takes half of the start-up time
        # of an engine of this size.
        gc.freeze()


def is_normalized_before(folder: Path) -> bool:
    """Whether vLLM has to be told to normalize the pixels of a model before its tower."""
    names = read_config(str(folder)).architectures or ()
    return any(name in BACKBONES and BACKBONES[name].host_norm for name in names)


class Recorded(NamedTuple):
    """Features of the pruned images, and the index of each kept row among the unpruned rows.

    ``rows`` has -1 for a row that equals no unpruned row. Rows of text are included for a video,
    and left out for an image. ``texts`` has, for each image, the number of token rows before each
    row of its text.
    """

    features: list[ImageFeatures]
    rows: Rows
    texts: Rows

    def add(
        self,
        context: SelectionContext,
        plan: ItemPlan,
        image: ImageFeatures,
        selected: Tensor,
    ) -> None:
        """Add an image with its selected rows ``(K, D)``."""
        unpruned = image.rows()
        selected = selected[:, : unpruned.shape[1]]  # without the positions of one axis
        columns = torch.ones(selected.shape[1], dtype=torch.bool)
        if context.parts.set_times is not None:
            # Channels of positions, which are written where text stands between tokens.
            columns[-count_channels(context.parts.axes) :] = False
        equal = (selected[:, None, columns] == unpruned[:, columns]).all(dim=2)
        equal = equal.to(torch.int8)
        is_token = equal.any(dim=1)
        rows = torch.where(is_token, equal.argmax(dim=1), -1)
        if plan.text:
            preceding, ids = torch.tensor(plan.text, device=rows.device).T
            text = context.parts.embed_text(ids)
            if torch.equal(selected[~is_token, : text.shape[1]], text):
                if plan.frames:
                    rows += torch.searchsorted(preceding, rows, right=True)
                    rows[~is_token] = preceding + torch.arange(len(preceding))
                else:
                    rows = rows[is_token]
        self.features.append(image)
        self.rows.append(rows.tolist())
        self.texts.append(is_token.cumsum(0)[~is_token].tolist())


class TinyEngine(Engine):
    """Engine of a tiny model that records the positions which the language model receives."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None, **options: object
    ) -> None:
        """Start it; it is stopped at the end of a ``with`` block."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        # vLLM's linear attention on a CPU takes bfloat16 only (cpu_gdn_attention_core).
        if "linear_attention" in (folder / "config.json").read_text():
            options["dtype"] = "bfloat16"
        super().__init__(
            folder,
            settings,
            max_model_len=1536,
            num_gpu_blocks_override=128,
            limit_mm_per_prompt={"image": 4},
            **options,
        )
        self.config = self.llm.llm_engine.vllm_config
        self.processor: Any = MULTIMODAL_REGISTRY.create_processor(
            self.config.model_config
        )
        self._positions: list[Tensor] = []

        def record(
            layer: nn.Module, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
        ) -> None:
            positions = named["positions"] if "positions" in named else inputs[0]
            self._positions.append(positions.clone())

        language_model = self.model.get_language_model()
        # vLLM calls the model without its hooks; Idefics3's has no head around it.
        layers = getattr(language_model, "model", language_model).layers
        layers[0].register_forward_pre_hook(record, with_kwargs=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def preempting(self, interval: int = STEPS_BETWEEN_PREEMPTIONS) -> Iterator[None]:
        """Preempt running requests every ``interval`` steps, during prefill and during decoding."""
        engine = self.llm.llm_engine
        step = engine.step
        steps = itertools.count(1)

        def step_with_preemption() -> Any:
            if next(steps) % interval == 0:
                engine.reset_prefix_cache(reset_running_requests=True)
            return step()

        with patch.object(engine, "step", step_with_preemption):
            yield

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Record the images that are pruned."""
        recorded = Recorded([], [], [])

        def prune_and_record(
            context: SelectionContext,
            plans: Sequence[ItemPlan],
            images: Sequence[ImageFeatures],
        ) -> list[Tensor]:
            selected = prune_images(context, plans, images)
            for plan, image, rows in zip(plans, images, selected, strict=True):
                recorded.add(context, plan, image, rows)
            return selected

        with patch.object(pruned_model, "prune_images", prune_and_record):
            yield recorded

    def ask(
        self,
        question: Question,
        budget: int | None = None,
        preempted: bool = False,
        later: Sequence[str] = (),
        **fields: object,
    ) -> Completion:
        """Ask about images, then in ``later`` turns; returns the completion of the last turn.

        ``fields`` are those of the request's entry.
        """
        text, images = question
        content: list[Any] = [
            {"type": "image_pil", "image_pil": image} for image in images
        ]
        content.append({"type": "text", "text": text + PADDING})
        messages: list[Any] = [{"role": "user", "content": content}]
        for turn in later:
            messages.append({"role": "assistant", "content": "blue"})
            messages.append({"role": "user", "content": turn})
        entry = fields if budget is None else {"budget": budget, **fields}
        options = {"mm_processor_kwargs": {"autoprune": entry}} if entry else {}
        return self._complete(self.llm.chat, messages, preempted, **options)

    def ask_each(
        self,
        questions: Mapping[str, Question],
        budget: int | None = None,
        preempted: bool = False,
    ) -> Completions:
        """Call :meth:`ask` for each question; completions are by its name."""
        return {
            name: self.ask(question, budget, preempted)
            for name, question in questions.items()
        }

    def ask_video(self, name: str, **fields: object) -> Completions:
        """The completion of a question about a video of four frames; empty if the model takes none.

        ``fields`` are those of the request's entry.
        """
        if "video" not in self.processor.info.get_supported_mm_limits():
            return {}
        placeholder = type(self.model).get_placeholder_str("video", 0)
        prompt: dict[str, Any] = {
            "prompt": f"user {placeholder} what is on the left you",
            "multi_modal_data": {"video": video(4)},
        }
        if fields:
            prompt["mm_processor_kwargs"] = {"autoprune": fields}
        return {name: self._complete(self.llm.generate, prompt)}

    def _complete(
        self,
        submit: Callable[..., Any],
        prompt: object,
        preempted: bool = False,
        **options: object,
    ) -> Completion:
        """Submit one prompt; returns its completion with the positions that the model received.

        A preempted request computes its tokens again, so the last positions recorded are its own;
        those of any other request are the first.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=4, logprobs=0, ignore_eos=True
        )
        (output,) = submit([prompt], sampling, use_tqdm=False, **options)
        generated = output.outputs[0]
        cached = 0 if preempted else output.num_cached_tokens or 0
        tokens = list(output.prompt_token_ids)
        ids = list(generated.token_ids)
        computed = len(tokens) + len(ids) - 1 - cached
        axes = torch.cat(self._positions, dim=-1)
        axes = axes.reshape(-1, axes.shape[-1])
        self._positions.clear()
        positions = axes[:, -computed:] if preempted else axes[:, :computed]
        return Completion(
            prompt=tokens,
            ids=ids,
            logprob=float(generated.cumulative_logprob),
            cached=cached,
            positions=positions.tolist(),
        )
