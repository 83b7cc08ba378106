"""Entry point of the plugin: adds the flags and reads the settings; does nothing without a state.

Model classes are registered only once a state is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm_autoprune.serving.compat import wraps

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DISABLE = "VLLM_AUTOPRUNE_DISABLE"
"""Environment variable that, set to 1, keeps the plugin out of a process altogether."""


def disabled() -> bool:
    """Whether the environment turns the plugin off."""
    return os.environ.get(DISABLE, "").strip().lower() in ("1", "true", "yes")


@wraps("vllm.engine.arg_utils:EngineArgs", "add_cli_args", "create_model_config")
@wraps("vllm.config:VllmConfig", "try_verify_and_update_config")
def register() -> None:
    """Called by vLLM in every process, possibly more than once (``vllm.general_plugins``).

    Installs three wrappers, none of which does anything until a state is set. One adds the flags to
    vLLM's parser, and one puts their settings on the model config. One checks the settings and
    removes them from ``additional_config`` before vLLM hashes it.

    Why: vLLM has no hook for a general plugin to add flags or to read its own settings.
    Remove when: it has one. Upstream asks plugins to move out of tree but offers a parser hook to
    platforms alone (``current_platform.pre_register_and_update``).
    """
    if disabled():
        return
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_autoprune.serving.compat import attach, get_attachment, patch
    from vllm_autoprune.serving.flags import add_flags
    from vllm_autoprune.serving.settings import SETTINGS_KEY, WAITING_SETTINGS

    @patch(EngineArgs, "add_cli_args")
    def add_cli_args(
        stock: Callable[..., FlexibleArgumentParser], *args: object, **named: object
    ) -> FlexibleArgumentParser:
        return add_flags(stock(*args, **named))

    @patch(EngineArgs, "create_model_config")
    def create_model_config(
        stock: Callable[..., ModelConfig],
        self: EngineArgs,
        *args: object,
        **named: object,
    ) -> ModelConfig:
        model_config = stock(self, *args, **named)
        additional = self.additional_config
        # ``vllm launch render`` makes only a model config, without ``additional_config``.
        if isinstance(additional, Mapping) and SETTINGS_KEY in additional:
            attach(model_config, WAITING_SETTINGS, dict(additional))
        return model_config

    @patch(VllmConfig, "try_verify_and_update_config")
    def verify(stock: Callable[[VllmConfig], None], vllm_config: VllmConfig) -> None:
        additional = vllm_config.additional_config
        model_config = vllm_config.model_config
        in_config = isinstance(additional, Mapping) and SETTINGS_KEY in additional
        # Imported late, because it registers counters: a server without settings has none in
        # /metrics.
        if in_config or get_attachment(model_config, WAITING_SETTINGS) is not None:
            from vllm_autoprune.serving.startup import apply_settings

            apply_settings(vllm_config)
        stock(vllm_config)
