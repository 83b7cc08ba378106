"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

Every arm has its own server and gets the same requests, one at a time. All language layers cost the
same, so the times of a deeper model grow linearly with its number of layers.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.report import (
    command_line,
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from benchmarks.common.requests import (
    build_body,
    build_content,
    draw_picture,
    encode_picture,
)
from benchmarks.common.shapes import draw_words, write_clip, write_shape
from benchmarks.cost.turns import Table as RowTable
from benchmarks.server import Server, ServerDied, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples
from vllm_autoprune import load_state
from vllm_autoprune.backbones import (
    ASSUMPTIONS,
    BACKBONE_SHAPES,
    BackboneShape,
    Cost,
    find_backbone,
)
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate, Spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_POLICIES = (
    "fastv",
    "pyramiddrop",
    "sparsevlm",
    "prumerge_plus",
    "trim",
    "visionzip",
    "dart",
    "divprune",
    "cdpruner",
)
_MINI = "mini-llava"
_FULL = "full"
_SERVED = "served"
_FLAGS = (
    f"--served-model-name {_SERVED} --block-size 32 --enforce-eager --max-num-seqs 8"
)
_WARM_UP = 2
_ANSWER_TOKENS = 16
_SHAPES = {"llava-1.5-7b": 336, "llava-next-7b": 672, "qwen2.5-vl-7b": 1008}
"""Side of the image, in pixels, that gives the published number of tokens, for each true shape."""
_NOTES = (
    *ASSUMPTIONS,
    "TFLOPs and KV (what a prompt needs of the cache) are computed for the published depth. Times "
    "are measured with the layers that are served, and include the whole vision tower: with fewer, "
    "their ratios are smaller.",
    "Tokens of the full model are counted as published: without a newline for each row.",
    "Prefill and decode: vLLM's own times of each request, of which prefill includes vision tower "
    "and selection. TTFT: at the client. One request at a time, always a new image. Medians with "
    "quartiles; times as fast: ratio of the medians, with its 95 % interval over requests.",
    "TFLOPs, K and KV follow from the shape, so they have no interval.",
)
_COLUMNS = (
    "method",
    "K",
    "TFLOPs",
    "prefill, ms",
    "times as fast",
    "TTFT, ms",
    "decode, ms/token",
    "KV, MiB",
)


@dataclass(frozen=True)
class _Model:
    """A served model: its folder, its shape at the served depth, and flags of its server."""

    name: str
    folder: Path
    shape: BackboneShape
    flags: str

    @property
    def published(self) -> BackboneShape:
        """The shape at the depth of the published model."""
        depth = (
            self.shape.layers
            if self.name == _MINI
            else BACKBONE_SHAPES[self.name].layers
        )
        return replace(self.shape, layers=depth)

    @classmethod
    def open(cls, name: str, layers: int, out: Path) -> _Model:
        """Open the model ``name``; ``out`` gets the folder of a model that is written for it."""
        if name == _MINI:
            return cls(_MINI, LLAVA, find_backbone(str(LLAVA)), "--max-model-len 1024")
        folder = write_shape(name, out / f"{name}-{layers}-layers", layers)
        flags = "--load-format dummy --max-model-len 4096"
        return cls(name, folder, replace(BACKBONE_SHAPES[name], layers=layers), flags)

    def draw_requests(self, count: int) -> list[bytes]:
        """A question about each of several images; mini-LLaVA gets examples of its test split."""
        if self.name == _MINI:
            by_image = {e.image_id: e for e in reversed(draw_examples("test", count))}
            pairs = [(by_image[i].png_url, by_image[i].question) for i in range(count)]
        else:
            side = _SHAPES[self.name]
            pairs = [
                (
                    encode_picture(draw_picture(number, side, side)),
                    draw_words(16, number),
                )
                for number in range(count)
            ]
        # A special first token would have no text, so its time could not be measured.
        fields = {"ignore_eos": True, "skip_special_tokens": False}
        return [
            build_body(
                _SERVED,
                build_content(text, [url]),
                tokens=_ANSWER_TOKENS,
                fields=fields,
            )
            for url, text in pairs
        ]

    def compute_cost(self, arm: str, budget: int, visual_tokens: float | None) -> Cost:
        """Cost by formula at the published depth, from the kept tokens that the plugin reports.

        The cost of a base policy that ranks by layers of the language model includes these layers
        over all tokens.
        """
        shape = self.published
        policy = BASE_POLICIES.get(arm)
        tokens = budget if visual_tokens is None else round(visual_tokens)
        layers = policy.default_params.layers_read(shape.layers) if policy else 0
        return shape.estimate_cost(
            shape.tokens if arm == _FULL else tokens, ranking_layers=layers
        )

    def describe(self, budget: int) -> str:
        """Name, served depth and K, for the head of a table."""
        layers = self.shape.layers
        depth = self.published.layers
        served = f"{layers}" if layers == depth else f"{layers} of {depth}"
        return f"{self.name}, {served} language layers served, K = {budget}"

    def write_rows(
        self, table: RowTable, budget: int, arms: Mapping[str, _Measurement | str]
    ) -> None:
        """Add the same figures as rows of ``docs/data``."""
        full = arms[_FULL]
        assert not isinstance(full, str)
        for arm, measured in arms.items():
            if isinstance(measured, str):
                continue
            setting = f"{self.describe(budget)}; {arm}"
            cost = self.compute_cost(arm, budget, measured.visual_tokens)
            table.add("visual tokens", setting, float(cost.tokens), "tokens")
            table.add("FLOPs", setting, cost.teraflops, "TFLOP")
            table.add("KV cache", setting, cost.kv_mib, "MiB")
            for what in ("prefill", "ttft", "decode"):
                table.add(what, setting, Spread.of(getattr(measured, what)), "s")
            ratio = measured.compare_prefill(full)
            table.add("prefill, times as fast as full", setting, ratio, "")

    def format_table(self, budget: int, arms: Mapping[str, _Measurement | str]) -> str:
        """The table in Markdown, the full model first, and notes on its columns."""
        full = arms[_FULL]
        full_cost = self.compute_cost(_FULL, budget, None)
        rows = []
        assert not isinstance(full, str)
        for arm, measured in arms.items():
            if isinstance(measured, str):
                empty = [""] * (len(_COLUMNS) - 2)
                rows.append([arm, f"not served: {measured}", *empty])
                continue
            cost = self.compute_cost(arm, budget, measured.visual_tokens)
            rows.append(
                [
                    arm,
                    f"{cost.tokens:g}",
                    f"{cost.teraflops:.4g} ({full_cost.flops / cost.flops:.1f}x fewer)",
                    format_spread(Spread.of(measured.prefill)),
                    format_estimate(measured.compare_prefill(full), digits=2),
                    format_spread(Spread.of(measured.ttft)),
                    format_spread(Spread.of(measured.decode)),
                    f"{cost.kv_mib:.4g}",
                ]
            )
        head = f"{self.describe(budget)}; {len(full.ttft)} requests a row\n"
        notes = (f"- {note}" for note in _NOTES)
        return "\n".join([head, Table("", _COLUMNS, rows).markdown(), "", *notes])


class _Measurement(FrozenModel):
    """Measured seconds and counts of one arm."""

    ttft: tuple[float, ...]
    """Time to first token at the client, with HTTP, image processor and vision tower."""
    prefill: tuple[float, ...]
    """Of each request, in the engine: vLLM's ``request_prefill_time_seconds``, vision tower
    included."""
    decode: tuple[float, ...]
    """Of each request per token after the first, from ``request_decode_time_seconds``."""
    visual_tokens: float | None
    """Kept tokens of an image by the plugin's count; None without the plugin."""

    def compare_prefill(self, full: _Measurement) -> Estimate:
        """How many times as fast as the full model's the prefill of the same requests is."""
        return Estimate.ratio_of_medians(full.prefill, self.prefill)

    @classmethod
    def of(cls, server: Server, requests: Sequence[bytes]) -> _Measurement:
        """Warm up a server, then send it all requests, one at a time."""
        client = Client(server.url, timeout=900)
        client.send_all(requests[:_WARM_UP])
        warm = _read_metrics(server, _WARM_UP)
        metrics = warm
        ttft = []
        times: dict[str, list[float]] = {"prefill": [], "decode": []}
        for number, request in enumerate(requests[_WARM_UP:], _WARM_UP + 1):
            (record,) = client.send_all([request])
            ttft.append(record.ttft)
            before = metrics
            metrics = _read_metrics(server, number)
            gained = metrics.since(before)
            for stage, seconds in times.items():
                name = f"vllm:request_{stage}_time_seconds_sum"
                seconds.append(gained.total(name) or 0.0)
        gained = metrics.since(warm)
        images = gained.total("autoprune_images_total")
        tokens = gained.total("autoprune_visual_tokens_total", stage="after") or 0.0
        return cls(
            ttft=tuple(ttft),
            prefill=tuple(times["prefill"]),
            decode=tuple(seconds / (_ANSWER_TOKENS - 1) for seconds in times["decode"]),
            visual_tokens=tokens / images if images else None,
        )


def _read_metrics(server: Server, count: int) -> Metrics:
    """Metrics of a server that has counted ``count`` requests, which it does after their answers.

    Raises :class:`BenchmarkError` if it does not within seconds.
    """
    name = "vllm:request_prefill_time_seconds_count"
    for _ in range(100):
        metrics = Metrics(server.get("/metrics"))
        if metrics.total(name) == count:
            return metrics
        time.sleep(0.05)
    raise BenchmarkError.of(
        f"{server.url}/metrics",
        f"{name} is {metrics.total(name)} after {count} requests",
        "let no other client ask this server",
    )


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--model": {
        "choices": (_MINI, *_SHAPES),
        "default": _MINI,
        "help": "checkpoint, or a true shape",
    },
    "--layers": {"type": int, "default": 2, "help": "language layers of a true shape"},
    "--budget": {"type": int, "help": "K (default: a ninth of the visual tokens)"},
    "--policies": {
        "default": ",".join(_POLICIES),
        "help": "base policies to compare with",
    },
    "--requests": {"type": int, "default": 20, "help": "timed requests of an arm"},
    "--kv-cache-gb": {
        "type": int,
        "default": 1,
        "help": "size of a CPU server's KV cache",
    },
    "--out": {
        "type": Path,
        "default": Path("out/efficiency"),
        "help": "folder of files",
    },
}


def run(options: argparse.Namespace) -> int:
    """Serve every arm, print and write the table; returns 0 if every arm was served, else 1."""
    model = _Model.open(options.model, options.layers, options.out)
    budget = options.budget or model.shape.tokens // 9
    pruning = ["--autoprune-budget", str(budget)]
    if model.shape.relevance == "clip":
        # A model with a true shape gets a CLIP with random weights, which is written once.
        tower = CLIP if model.name == _MINI else write_clip(options.out / "clip")
        pruning += ["--autoprune-text-tower", str(tower)]
    states: dict[str, str | None] = {_FULL: None}
    states |= {name: name for name in options.policies.split(",") if name}
    states["AutoPrune"] = "autoprune"
    for policy in filter(None, states.values()):
        load_state(policy)  # refuses a wrong name before any server starts
    requests = model.draw_requests(_WARM_UP + options.requests)
    layers = model.shape.layers
    label = model.name + (
        f"-{layers}-layers" if layers != model.published.layers else ""
    )
    (options.out / "servers").mkdir(parents=True, exist_ok=True)
    arms: dict[str, _Measurement | str] = {}
    for name, state in states.items():
        flags = [*_FLAGS.split(), *model.flags.split()]
        if state:
            flags += ["--autoprune-state", state, *pruning]
        kv = {"VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gb)}
        log = options.out / "servers" / f"{label}-{name}.log"
        try:
            with serve(model.folder, *flags, env=kv, log=log, patience=900) as server:
                arms[name] = arm = _Measurement.of(server, requests)
            log_progress(f"{name}: prefill {median(arm.prefill):.3f} s")
        except ServerDied as error:
            if name == _FULL:  # every other arm is compared with it
                raise
            arms[name] = error.problems[0].what[:300]
            log_progress(f"{name}: {error}")
    text = model.format_table(budget, arms)
    text += f"\n\n{format_environment()}\n\nCommand: `{shlex.join(command_line())}`\n"
    (options.out / f"{label}.md").write_text(text)
    with (options.out / f"{label}.csv").open("w", encoding="utf-8") as file:
        model.write_rows(RowTable(file), budget, arms)
    print(text)
    return int(any(isinstance(arm, str) for arm in arms.values()))
