"""Names within vLLM that the plugin depends on: declared where they are used, looked up here.

A name that is imported says so by its import. What is patched, overridden or called as an attribute
is declared by :func:`depends_on` beside the code that does it.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_autoprune.errors import ConfigError, Problem

T = TypeVar("T", bound=Callable[..., Any])

_ROOM = "vllm_autoprune.serving"

_USERS = (
    *("plugin", "compat", "compat.api", "compat.worker", "encoder_budget", "served_state"),
    *("api.engine_requests", "api.image_store", "api.planner", "api.processor", "api.renderer"),
)
"""Modules whose names every server needs; a backbone's module comes to them."""

FAMILIES = ("llava", "qwen", "tiled")
"""Modules of backbones."""

WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Hook:
    """Names in ``module``, dotted for attributes, that ``used_by`` depends on."""

    module: str
    names: tuple[str, ...]
    used_by: str
    only: str = ""
    """The stock model class, or ``"worker"``, that alone relies on them; empty: every server."""


_declared: list[Hook] = []


def depends_on(place: str, *names: str, only: str = "") -> Callable[[T], T]:
    """Declare names that the decorated function or class depends on.

    ``place`` is what has them: a vLLM module, or ``module:Class``.
    """
    module, _, owner = place.partition(":")
    if owner:
        names = tuple(f"{owner}.{name}" for name in names)

    def declare(user: T) -> T:
        where = user.__module__.removeprefix(f"{_ROOM}.")
        purpose = (inspect.getdoc(user) or user.__qualname__).partition("\n")[0]
        _declared.append(Hook(module, names, f"{where}: {purpose}", only))
        return user

    return declare


def declare_model(stock: type, methods: Sequence[str], merger: str = "") -> None:
    """Declare the names that serving a model class pruned depends on.

    ``methods`` are those of the class beyond what every model needs; ``merger`` is the class of its
    patch merger, which is called with what states rank before it.
    """
    common = ("_processor_factory", "embed_multimodal", "load_weights")
    names = [f"{stock.__name__}.{name}" for name in (*common, *methods)]
    if merger:
        module, _, kind = merger.rpartition(".")
        if module:
            where = f"vllm.model_executor.models.{module}"
            _declared.append(Hook(where, (f"{kind}.forward",), "models: merger", stock.__name__))
        else:
            names.append(f"{kind}.forward")
    used_by = f"models: {stock.__name__}"
    _declared.append(Hook(stock.__module__, tuple(names), used_by, stock.__name__))


def collect_hooks(families: Sequence[str] = FAMILIES) -> tuple[list[Hook], list[Problem]]:
    """All names that are declared, and the modules of ours that this vLLM cannot import."""
    problems = []
    for user in (*_USERS, *(f"models.{family}" for family in families)):
        try:
            importlib.import_module(f"{_ROOM}.{user}")
        except Exception as error:  # a broken installation may raise anything
            what = f"cannot be imported ({type(error).__name__}: {error})"
            problems.append(Problem(f"{_ROOM}.{user}", what, _FIX))
    return _declared, problems


def require_hooks(stock: str, family: str) -> None:
    """Raise if this vLLM lacks a name that serving this model class depends on.

    Raises :class:`ConfigError` with every name. Within the versions that are allowed at all this
    finds builds that differ from the release they name.
    """
    hooks, problems = collect_hooks([family])
    problems += [
        Problem(f"{hook.module}.{name}", f"is not there ({hook.used_by})", _FIX)
        for hook in hooks
        if hook.only in ("", stock)
        for name in find_missing_names(hook)
    ]
    if problems:
        raise ConfigError("this vLLM is not the one that the plugin was written for", problems)


_FIX = "install a released vLLM in the supported range, and see `vllm-autoprune doctor`"


def find_missing_names(hook: Hook) -> tuple[str, ...]:
    """The names of a hook that this vLLM lacks; the module itself where its import fails."""
    try:
        module = importlib.import_module(hook.module)
    except Exception as error:  # a broken installation may raise anything
        return (f"{hook.module} ({type(error).__name__}: {error})",)
    return tuple(name for name in hook.names if not _has(module, name))


def _has(module: object, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True
