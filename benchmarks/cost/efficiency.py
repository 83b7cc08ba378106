"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

Every arm has its own server and gets the same requests, in waves of one or several users. All
language layers cost the same, so the times of a deeper model grow linearly with its number of
layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.memory import (
    MEMORY_ENVIRONMENT,
    MEMORY_FLAGS,
    begin_peak_memory,
    read_peak_memory,
)
from benchmarks.common.report import (
    MIB,
    command_line,
    environment,
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from benchmarks.common.requests import (
    build_body,
    build_content,
    crop_pictures,
    encode_picture,
)
from benchmarks.common.shapes import draw_words, write_clip, write_shape
from benchmarks.cost.turns import Table as RowTable
from benchmarks.server import Server, ServerDied, default_flags, serve
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
_WARM_UP = 2
_WAVES = 5
"""Least number of waves of several users, of which intervals are made."""
_ANSWER_TOKENS = 16
_SHAPES = {"llava-1.5-7b": 336, "llava-next-7b": 672, "qwen2.5-vl-7b": 1008}
"""Side of the image, in pixels, that gives the published number of tokens, for each true shape."""
_MINI_SIDE = 96
_NOTES = (
    *ASSUMPTIONS,
    "TFLOPs and KV (what a prompt needs of the cache) are computed for the published depth. Times "
    "are measured with the layers that are served, and include the whole vision tower: with fewer, "
    "their ratios are smaller.",
    "Tokens of the full model are counted as published: without a newline for each row.",
    "Prefill and decode: vLLM's own times of each request, of which prefill includes vision tower "
    "and selection. TTFT: at the client. Every wave of requests has new images; its times in the "
    "engine are means over its requests, and the next wave waits for all answers. Medians with "
    "quartiles; times as fast: ratio of the medians, with its 95 % interval over waves.",
    "TFLOPs, K and KV follow from the shape, so they have no interval. Peak memory is that of a "
    "GPU's tensors beyond weights and KV cache, the feature cache included.",
    "The published table's score is left out: random weights have none.",
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
    "requests/s",
    "peak memory, MiB",
)


@dataclass(frozen=True)
class ServedModel:
    """A served model: its folder, its shape at the served depth, and flags of its server."""

    name: str
    folder: Path
    shape: BackboneShape
    flags: str

    @property
    def side(self) -> int:
        """Side of a picture, in pixels, that gives the published number of tokens."""
        return _SHAPES.get(self.name, _MINI_SIDE)

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
    def open(cls, name: str, layers: int, out: Path) -> ServedModel:
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
            pictures = crop_pictures(0, count, self.side, self.side)
            pairs = [
                (encode_picture(picture, "jpeg"), draw_words(16, number))
                for number, picture in enumerate(pictures)
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


class _Measurement(FrozenModel):
    """Measured seconds and counts of one arm, with one number of users."""

    ttft: tuple[float, ...]
    """Of each request, time to first token at the client, with HTTP, image processor and vision
    tower."""
    prefill: tuple[float, ...]
    """Of each wave, in the engine: mean of vLLM's ``request_prefill_time_seconds``, vision tower
    included."""
    decode: tuple[float, ...]
    """Of each wave per token after the first, from ``request_decode_time_seconds``."""
    throughput: tuple[float, ...]
    """Of each wave: requests a second."""
    visual_tokens: float | None
    """Kept tokens of an image by the plugin's count; None without the plugin."""
    peak_memory: int | None
    """Bytes on the GPU beyond weights and KV cache; None on a CPU."""

    def compare_prefill(self, full: _Measurement) -> Estimate:
        """How many times as fast as the full model's the prefill of the same requests is."""
        return Estimate.ratio_of_medians(full.prefill, self.prefill)

    @classmethod
    def of(
        cls, server: Server, requests: Sequence[bytes], users: int, counted: int
    ) -> _Measurement:
        """Send a server requests in waves; it has counted ``counted`` requests before."""
        client = Client(server.url, timeout=900)
        begin_peak_memory(server)
        warm = metrics = _read_metrics(server, counted)
        ttft: list[float] = []
        throughput = []
        times: dict[str, list[float]] = {"prefill": [], "decode": []}
        for number in range(0, len(requests), users):
            begin = time.perf_counter()
            records = client.send_all(requests[number : number + users], users)
            throughput.append(users / (time.perf_counter() - begin))
            ttft += [record.ttft for record in records]
            before = metrics
            metrics = _read_metrics(server, counted + number + users)
            gained = metrics.since(before)
            for stage, seconds in times.items():
                name = f"vllm:request_{stage}_time_seconds_sum"
                seconds.append((gained.total(name) or 0.0) / users)
        gained = metrics.since(warm)
        images = gained.total("autoprune_images_total")
        tokens = gained.total("autoprune_visual_tokens_total", stage="after") or 0.0
        return cls(
            ttft=tuple(ttft),
            prefill=tuple(times["prefill"]),
            decode=tuple(seconds / (_ANSWER_TOKENS - 1) for seconds in times["decode"]),
            throughput=tuple(throughput),
            visual_tokens=tokens / images if images else None,
            peak_memory=read_peak_memory(server),
        )


_Arm = Mapping[int, _Measurement] | str
"""Measurements of an arm by number of users; or why it was not served."""


@dataclass(frozen=True)
class _Results:
    """Results of all arms so far, the full model first, and the files that they are written to."""

    model: ServedModel
    budget: int
    users: Sequence[int]
    file: Path
    """Without its suffix."""
    arms: dict[str, _Arm] = dataclasses.field(default_factory=dict)

    def add(self, name: str, arm: _Arm) -> str:
        """Add an arm and write all files anew; returns the tables in Markdown."""
        self.arms[name] = arm
        text = "\n\n".join(map(self._format_table, self.users))
        notes = "\n".join(f"- {note}" for note in _NOTES)
        command = shlex.join(command_line())
        text += f"\n\n{notes}\n\n{format_environment()}\n\nCommand: `{command}`\n"
        self.file.with_suffix(".md").write_text(text)
        with self.file.with_suffix(".csv").open("w", encoding="utf-8") as file:
            self._write_rows(RowTable(file))
        record = {
            "model": self.model.describe(self.budget),
            "command": command,
            "environment": environment(),
            "notes": _NOTES,
            "rows": list(self._list_records()),
        }
        self.file.with_suffix(".json").write_text(json.dumps(record, indent=1))
        return text

    def _measured(self, users: int) -> Iterator[tuple[str, _Measurement, Cost]]:
        """Arms that were served, with the cost by formula."""
        for name, arm in self.arms.items():
            if not isinstance(arm, str):
                measured = arm[users]
                tokens = measured.visual_tokens
                yield name, measured, self.model.compute_cost(name, self.budget, tokens)

    def _list_records(self) -> Iterator[dict[str, object]]:
        """What was measured and computed of each arm and number of users, as JSON."""
        for users in self.users:
            full: _Measurement | None = None
            for name, measured, cost in self._measured(users):
                full = full or measured
                ratio = measured.compare_prefill(full)
                yield {
                    "arm": name,
                    "users": users,
                    "tokens": cost.tokens,
                    "teraflops": cost.teraflops,
                    "kv_mib": cost.kv_mib,
                    "prefill_times_as_fast": dataclasses.asdict(ratio),
                    **measured.model_dump(),
                }

    def _write_rows(self, table: RowTable) -> None:
        """Add the same figures as rows of ``docs/data``."""
        for users in self.users:
            full: _Measurement | None = None
            for name, measured, cost in self._measured(users):
                full = full or measured
                at_once = "" if users == 1 else f"; {users} at once"
                setting = f"{self.model.describe(self.budget)}{at_once}; {name}"
                table.add("visual tokens", setting, float(cost.tokens), "tokens")
                table.add("FLOPs", setting, cost.teraflops, "TFLOP")
                table.add("KV cache", setting, cost.kv_mib, "MiB")
                for what in ("prefill", "ttft", "decode"):
                    table.add(what, setting, Spread.of(getattr(measured, what)), "s")
                rates = Spread.of(measured.throughput)
                table.add("throughput", setting, rates, "requests/s")
                ratio = measured.compare_prefill(full)
                table.add("prefill, times as fast as full", setting, ratio, "")
                if measured.peak_memory is not None:
                    mib = measured.peak_memory / MIB
                    table.add("peak memory", setting, mib, "MiB")

    def _format_table(self, users: int) -> str:
        """The table in Markdown of one number of users."""
        rows = []
        served = list(self._measured(users))
        _, full, full_cost = served[0]
        for name, measured, cost in served:
            peak = measured.peak_memory
            rates = Spread.of(measured.throughput)
            rows.append(
                [
                    name,
                    f"{cost.tokens:g}",
                    f"{cost.teraflops:.4g} ({full_cost.flops / cost.flops:.1f}x fewer)",
                    format_spread(Spread.of(measured.prefill)),
                    format_estimate(measured.compare_prefill(full), digits=2),
                    format_spread(Spread.of(measured.ttft)),
                    format_spread(Spread.of(measured.decode)),
                    f"{cost.kv_mib:.4g}",
                    f"{rates.median:.3g} ({rates.low:.3g}–{rates.high:.3g})",
                    "no GPU" if peak is None else f"{peak / MIB:,.0f}",
                ]
            )
        empty = [""] * (len(_COLUMNS) - 2)
        rows += [
            [name, f"not served: {arm}", *empty]
            for name, arm in self.arms.items()
            if isinstance(arm, str)
        ]
        head = f"{self.model.describe(self.budget)}; {len(full.ttft)} requests a row"
        if users > 1:
            head += f", {users} at once"
        return f"{head}\n\n{Table('', _COLUMNS, rows).markdown()}"


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
    "--users": {"default": "1", "help": "numbers of requests at once, such as 1,8,32"},
    "--requests": {
        "type": int,
        "default": 20,
        "help": f"timed requests of an arm; at least {_WAVES} times as many as users",
    },
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
    model = ServedModel.open(options.model, options.layers, options.out)
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
    users = [int(number) for number in options.users.split(",")]
    waves = {
        count: options.requests
        if count == 1
        else max(options.requests // count, _WAVES)
        for count in users
    }
    total = sum(count * number for count, number in waves.items())
    requests = model.draw_requests(_WARM_UP + total)
    layers = model.shape.layers
    label = model.name + (
        f"-{layers}-layers" if layers != model.published.layers else ""
    )
    (options.out / "servers").mkdir(parents=True, exist_ok=True)
    results = _Results(model, budget, users, options.out / label)
    text = ""
    for name, state in states.items():
        flags = [*default_flags(), *model.flags.split(), *MEMORY_FLAGS]
        if state:
            flags += ["--autoprune-state", state, *pruning]
        log = options.out / "servers" / f"{label}-{name}.log"
        kv = {"VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gb)}
        served = ("--served-model-name", _SERVED, *flags)
        settings = {**kv, **MEMORY_ENVIRONMENT}
        arm: _Arm
        try:
            with serve(
                model.folder, *served, env=settings, log=log, patience=900
            ) as server:
                arm = _measure(server, requests, waves)
            log_progress(f"{name}: prefill {median(arm[users[0]].prefill):.3f} s")
        except ServerDied as error:
            if name == _FULL:  # every other arm is compared with it
                raise
            arm = error.problems[0].what[:300]
            log_progress(f"{name}: {error}")
        text = results.add(name, arm)
    print(text)
    return int(any(isinstance(arm, str) for arm in results.arms.values()))


def _measure(
    server: Server, requests: Sequence[bytes], waves: Mapping[int, int]
) -> dict[int, _Measurement]:
    """Warm up a server, then measure each number of users, with so many waves of new images."""
    Client(server.url, timeout=900).send_all(requests[:_WARM_UP])
    counted = _WARM_UP
    measured = {}
    for users, number in waves.items():
        end = counted + users * number
        batch = requests[counted:end]
        measured[users] = _Measurement.of(server, batch, users, counted)
        counted = end
    return measured
