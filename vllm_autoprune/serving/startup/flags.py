"""Flags of `vllm serve`, in a group of their own.

A flag writes plain data into ``additional_config["autoprune"]``, the same place that
``LLM(..., additional_config={"autoprune": {...}})`` fills, so both ways are one from there on.
Values are checked later, where the model is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

SETTINGS_KEY = "autoprune"
"""Key of the plugin's settings in vLLM's ``additional_config``."""

MIDDLEWARE = "vllm_autoprune.serving.api.request_headers.KeepRequest"
"""Import path of the middleware that keeps our headers, for vLLM's ``--middleware``."""

_FLAGS: tuple[tuple[str, str, str], ...] = (
    (
        "state",
        "PATH|NAME",
        "Pruning state to serve: a JSON file, or the name of one that ships with the package "
        "(such as `autoprune`). Without it the plugin is inert.",
    ),
    (
        "budget",
        "K",
        "Visual tokens kept of every image, instead of the state's own budget.",
    ),
    (
        "text-tower",
        "PATH|HF_ID",
        "CLIP checkpoint whose text tower measures how relevant a token is to the instruction "
        "(for LLaVA-1.5: openai/clip-vit-large-patch14-336). Without it the language model's own "
        "input embeddings do.",
    ),
    (
        "feature-cache-gb",
        "GB",
        "Bound of the per-image feature cache on each worker's device, which lets further "
        "questions on an image skip the vision tower; 0 turns it off. Default: 0.25.",
    ),
    (
        "requests",
        "LEVEL[:MIN-MAX]",
        "What a request may set for itself: `none`; `budget`, a budget or no pruning; "
        "`shipped-states`, also a state that ships; `states`, any state. A range bounds the tokens "
        "of one image. "
        "Unless given, vLLM refuses requests that ask (see --trust-request-mm-kwargs).",
    ),
    (
        "detail",
        "low=K,high=K",
        "Visual tokens kept of an image whose `image_url.detail` in a request is `low` or `high`, "
        "whatever --autoprune-requests allows. Unless given, `image_url.detail` changes nothing.",
    ),
    (
        "recall",
        "K_r",
        "Visual tokens that a later user turn without an image gets of the conversation's images, "
        "chosen by its own text among those not kept yet. Earlier turns stay in the prefix cache. "
        "Default: 0.",
    ),
    (
        "request-cost",
        "MS",
        "Bound on a state that a request brings: predicted milliseconds of one CPU core for one "
        "selection from an image of 576 tokens. Default: 200, six times the shipped `autoprune`.",
    ),
)


class _Setting(argparse.Action):
    """Store a flag's raw text under its name in ``additional_config``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        key = self.dest.removeprefix("autoprune_")
        _merge(namespace, {SETTINGS_KEY: {key: values, "from_flags": True}})


def _merge(namespace: argparse.Namespace, extra: Mapping[str, object]) -> None:
    # The default dict belongs to the parser and is shared between parses: never changed here.
    merged = dict(vars(namespace).get("additional_config") or {})
    for key, value in extra.items():
        before = merged.get(key)
        if key == SETTINGS_KEY and isinstance(value, Mapping) and isinstance(before, Mapping):
            value = {**before, **value}
        merged[key] = value
    namespace.additional_config = merged
    added = vars(namespace).get("middleware")  # parsers without a server have none
    if SETTINGS_KEY in merged and added is not None and MIDDLEWARE not in added:
        namespace.middleware = [*added, MIDDLEWARE]


def _merging(action: argparse.Action) -> None:
    """Let `--additional-config` add to what the plugin's flags set, in either order."""
    stock = type(action)

    class Merging(stock):  # type: ignore[misc, valid-type]
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[object] | None,
            option_string: str | None = None,
        ) -> None:
            before = vars(namespace).get("additional_config")
            super().__call__(parser, namespace, values, option_string)
            parsed = namespace.additional_config
            if not isinstance(parsed, Mapping):
                raise argparse.ArgumentError(self, f"not a JSON object: {parsed!r}")
            namespace.additional_config = before
            _merge(namespace, parsed)

    action.__class__ = Merging


def wrap_add_cli_args(
    add_cli_args: Callable[..., FlexibleArgumentParser],
) -> Callable[..., FlexibleArgumentParser]:
    """Wrap ``EngineArgs.add_cli_args`` so that it adds the plugin's flags."""

    def add_with_flags(
        parser: FlexibleArgumentParser, *args: object, **kwargs: object
    ) -> FlexibleArgumentParser:
        parser = add_cli_args(parser, *args, **kwargs)
        group = parser.add_argument_group(
            "AutoPrune", "Keep K of N visual tokens before prefill (vllm-autoprune)."
        )
        for name, metavar, text in _FLAGS:
            group.add_argument(
                f"--autoprune-{name}",
                action=_Setting,
                dest=f"autoprune_{name.replace('-', '_')}",
                default=argparse.SUPPRESS,
                metavar=metavar,
                help=text,
            )
        for action in parser._actions:
            if "--additional-config" in action.option_strings:
                _merging(action)
        return parser

    return add_with_flags
