"""Flags of `vllm serve`, in their own group; values are checked once the model is known."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_autoprune import flags
from vllm_autoprune.serving.settings import SETTINGS_KEY, Settings

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

MIDDLEWARE = "vllm_autoprune.serving.api.headers.KeepHeaders"
"""Import path of the middleware that keeps the plugin's headers, for vLLM's ``--middleware``."""

_PREFIX = f"{SETTINGS_KEY}_"


class _Merge(argparse.Action):
    """Merge a flag's text, or the value of ``--additional-config``, into ``additional_config``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        extra = values
        if self.dest != "additional_config":
            key = self.dest.removeprefix(_PREFIX)
            extra = {SETTINGS_KEY: {key: values, "from_flags": True}}
        if not isinstance(extra, Mapping):
            raise argparse.ArgumentError(self, f"not a JSON object: {extra!r}")
        # The default dict belongs to the parser and is shared between parses, so it is never
        # changed.
        merged = dict(vars(namespace).get("additional_config") or {})
        for key, value in extra.items():
            previous = merged.get(key)
            if key == SETTINGS_KEY and isinstance(previous, Mapping):
                value = {**previous, **value} if isinstance(value, Mapping) else value
            merged[key] = value
        namespace.additional_config = merged
        added = vars(namespace).get("middleware")  # a parser without a server has none
        if SETTINGS_KEY in merged and added is not None and MIDDLEWARE not in added:
            namespace.middleware = [*added, MIDDLEWARE]


def add_flags(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add the plugin's flags to vLLM's parser.

    ``--additional-config`` then adds to what the flags set, in either order.
    """
    group = parser.add_argument_group(
        "AutoPrune", "Keep K of N visual tokens before prefill (vllm-autoprune)."
    )
    flags.add_flags(group, Settings, {}, prefix=_PREFIX, action=_Merge)
    for action in parser._actions:
        if "--additional-config" in action.option_strings:
            action.__class__ = _Merge
    return parser
