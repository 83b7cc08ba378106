"""`python -m benchmarks.cost efficiency`: full model, base policies and AutoPrune, as a table.

    python -m benchmarks.cost efficiency --model mini-llava --budget 16
    python -m benchmarks.cost efficiency --model llava-next-7b --layers 1 --policies cdpruner
    python -m benchmarks.cost efficiency --model llava-next-7b --layers 4 --policies cdpruner
    python -m benchmarks.cost depth out/efficiency/llava-next-7b-{1,4}-layers.json

``depth`` composes time to first token at full depth from tables at two depths: all layers cost the
same, so it is linear in their number. The slope is the prefill of one layer; the value at zero
layers is vision tower, selection, HTTP and the language model's head.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client, MetricsWatcher, Record
from benchmarks.common.report import (
    MIB,
    command_line,
    environment,
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from benchmarks.common.shapes import write_clip, write_llava, write_llava_next, write_qwen
from benchmarks.load.experiment import Arm, interleave
from benchmarks.load.settings import Workload
from benchmarks.load.workload import Prepared, prepare
from benchmarks.server import Server, ServerDied, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA
from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape
from vllm_autoprune.cost import ASSUMPTIONS, Cost, estimate_cost
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import (
    DRAWS,
    Estimate,
    Floats,
    Indices,
    estimate,
    medians,
    resample,
    spread,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_POLICIES = (
    "fastv", "pyramiddrop", "sparsevlm", "prumerge_plus", "trim", "visionzip", "dart",
    "divprune", "cdpruner",
)  # fmt: skip
MINI, FULL, SERVED = "mini-llava", "full", "served"
_SHAPES: Mapping[str, tuple[int, Callable[[Path, int], Path]]] = {
    "llava-1.5-7b": (336, write_llava),
    "llava-next-7b": (672, write_llava_next),
    "qwen2.5-vl-7b": (1008, write_qwen),
}
"""True shapes: side of the image that gives the published number of tokens, writer."""
_PATH = os.pathsep.join(
    [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
)
"""Where the workers of a server find this module, which is not installed."""


@dataclass(frozen=True)
class Model:
    """What is served, and the image size that gives the published number of tokens."""

    name: str
    folder: Path
    geometry: BackboneShape
    """With the depth that is served."""
    depth: int
    """Language layers of the published model."""
    side: int
    """Of the square images, pixels."""
    flags: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of its files, with the depth where it is not the published one."""
        layers = self.geometry.layers
        return self.name if layers == self.depth else f"{self.name}-{layers}-layers"

    def estimate(self, tokens: int, ranking_layers: int = 0) -> Cost:
        """The cost of a prompt by formula, at the published depth."""
        at_full_depth = replace(self.geometry, layers=self.depth)
        return estimate_cost(at_full_depth, tokens, ranking_layers=ranking_layers)


def _load_model(name: str, layers: int, out: Path) -> Model:
    """The model of that name; the folder of a shape is written below ``out``."""
    if name != MINI:
        geometry, (side, write) = BACKBONE_SHAPES[name], _SHAPES[name]
        folder = write(out / f"{name}-{layers}-layers", layers)
        flags = ("--load-format", "dummy", "--max-model-len", "4096")
        return Model(name, folder, replace(geometry, layers=layers), geometry.layers, side, flags)
    config = json.loads((LLAVA / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    grid = int(vision["image_size"]) // int(vision["patch_size"])
    geometry = replace(
        BACKBONE_SHAPES["llava-1.5-7b"],
        name=LLAVA.name,
        layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        feed_forward=int(text["intermediate_size"]),
        kv_width=int(text["num_key_value_heads"]) * int(text["head_dim"]),
        grid_height=grid,
        grid_width=grid,
        source=str(LLAVA),
    )
    return Model(MINI, LLAVA, geometry, geometry.layers, 168, ("--max-model-len", "1024"))


class Pass(FrozenModel):
    """Measurements of one arm while its requests ran once: seconds, bytes and counts."""

    ttft: tuple[float, ...]
    """At the client: HTTP, image processor and vision tower included."""
    again: tuple[float, ...] = ()
    """The same for a second question on the same image, right after the first."""
    prefill: float
    """In the engine, mean: vLLM's own ``request_prefill_time_seconds``, vision tower included."""
    decode: tuple[float, ...]
    """Per token after the first, of each request."""
    prompt_tokens: float
    visual_tokens: float | None
    """Kept tokens of an image, as the plugin counts them; None without the plugin."""
    device_memory: int | None
    """Most memory that the workers had allocated on their GPUs during the requests, all ranks
    together; None without a GPU."""


class Refusal(FrozenModel):
    """The reason why an arm cannot be served."""

    reason: str


_Passes = Mapping[str, Sequence[Pass | Refusal]]
"""By arm, in the order of rows; the full model first."""


class DeviceMemory:
    """Extension of vLLM's workers (``--worker-extension-cls``) that reads the memory of the GPU.

    Only the process that allocates can tell what was allocated at most: the driver counts all
    that vLLM reserved at its start, which is the same however many tokens are kept.
    """

    device: torch.device

    def reset_device_memory(self) -> None:
        """Forget the peak of the start, when vLLM runs its largest batch."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_device_memory(self) -> int | None:
        """Most bytes allocated since the reset; None on another device than a CUDA GPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)


def _call_workers(server: Server, method: str) -> list[object]:
    status, answer = server.post("/collective_rpc", {"method": method})
    results = answer.get("results")
    if status != 200 or not isinstance(results, list):
        raise BenchmarkError(f"{method}: status {status}: {json.dumps(answer)[:200]}")
    return results


def _measure(arm: Arm, requests: Prepared, log: Path) -> Pass | Refusal:
    """Serve the arm and send all requests; a :class:`Refusal` where the server does not start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    extension = f"{DeviceMemory.__module__}.{DeviceMemory.__qualname__}"
    flags = (*arm.flags, "--worker-extension-cls", extension)
    # The endpoint that calls methods of the workers needs the development mode.
    environment = {**dict(arm.environment), "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": _PATH}
    try:
        with serve(arm.model, *flags, env=environment, log=log, patience=900) as server:
            return _send_requests(server, requests)
    except ServerDied as error:
        # The plugin's refusal, else the last line of the log.
        _, refused, refusal = str(error).partition("vllm-autoprune: ")
        reason = refusal if refused else str(error).strip().splitlines()[-1]
        return Refusal(reason=" ".join(reason.split())[:300])


def _send_requests(server: Server, requests: Prepared) -> Pass:
    client = Client(server.url, timeout=900)

    def read_prefill() -> float:
        metrics = Metrics(server.get("/metrics"))
        return metrics.total("vllm:request_prefill_time_seconds_sum") or 0.0

    for body in requests.warm_up:
        client.send(body)
    _call_workers(server, DeviceMemory.reset_device_memory.__name__)
    watcher = MetricsWatcher(server.url)
    watcher.update()
    records, again = list[Record](), list[Record]()
    prefill = 0.0
    for body in requests.measured:
        before = read_prefill()
        records.append(client.send(body))
        prefill += read_prefill() - before
        # A question about the same image with the same words in reverse order.
        content = json.loads(body)
        question = content["messages"][0]["content"][-1]
        question["text"] = " ".join(reversed(question["text"].split()))
        again.append(client.send(json.dumps(content).encode()))
    watcher.update()
    metrics = watcher.metrics()
    failed = [record.error for record in (*records, *again) if record.error]
    if failed:
        raise BenchmarkError(f"{len(failed)} requests failed: {failed[0]}")
    kept, images = metrics.visual_tokens_after, metrics.images
    peaks = _call_workers(server, DeviceMemory.peak_device_memory.__name__)
    return Pass(
        ttft=tuple(record.ttft for record in records),
        again=tuple(record.ttft for record in again),
        prefill=prefill / len(records),
        decode=tuple(tpot for record in records if (tpot := record.tpot) is not None),
        prompt_tokens=sum(r.prompt_tokens or 0 for r in records) / len(records),
        visual_tokens=kept / images if kept and images else None,
        device_memory=None if None in peaks else sum(int(str(peak)) for peak in peaks),
    )


def format_table(model: Model, budget: int, passes: _Passes) -> str:
    """The table in Markdown, and notes on its columns."""
    full = [entry for entry in passes.get(FULL, ()) if isinstance(entry, Pass)]
    cells: list[dict[str, str]] = []
    for arm, all_passes in passes.items():
        measured = [entry for entry in all_passes if isinstance(entry, Pass)]
        if measured:
            cells.append(_describe_arm(model, arm, budget, measured, full or measured))
        else:
            reasons = [entry.reason for entry in all_passes if isinstance(entry, Refusal)]
            cells.append({"method": arm, "K": f"not served: {(*reasons, 'no pass')[0]}"})
    columns = max(map(list, cells), key=len, default=[])
    rows = [[row.get(column, "") for column in columns] for row in cells]
    served = f"{model.geometry.layers}"
    served += "" if model.depth == model.geometry.layers else f" of {model.depth}"
    head = (
        f"{model.name}, {served} language layers served, K = {budget}; "
        f"{sum(len(entry.ttft) for entry in full)} timed requests a row, in {len(full)} passes\n"
    )
    notes = (f"- {line}" for line in _NOTES)
    return "\n".join([head, Table("", columns, rows).markdown(), "", *notes])


def _describe_arm(
    model: Model, arm: str, budget: int, measured: Sequence[Pass], full: Sequence[Pass]
) -> dict[str, str]:
    """The row of an arm, by column."""
    computed = compute_cost(model, arm, budget, measured)
    prefill = mean(entry.prefill for entry in measured)
    fewer = model.estimate(model.geometry.tokens).flops / computed.flops
    waits = spread([value for entry in measured for value in entry.ttft])
    again = [1000 * value for entry in measured for value in entry.again]
    ratio = median(again) / (1000 * waits.median) if again else 0.0
    memory = [entry.device_memory for entry in measured if entry.device_memory is not None]
    faster = mean(entry.prefill for entry in full) / prefill
    decode = 1000 * median(value for entry in measured for value in entry.decode)
    return {
        "method": arm,
        "K": f"{computed.tokens:g}",
        "TFLOPs": f"{computed.teraflops:.4g} ({fewer:.1f}x fewer)",
        "prefill, ms": f"{1000 * prefill:.1f} ({faster:.2f}x faster)",
        "TTFT, ms: median (quartiles)": format_spread(waits),
        "second question, ms": f"{median(again):.1f} ({ratio:.2f}x)" if again else "not measured",
        "decode, ms/token": f"{decode:.2f}",
        "KV, MiB": f"{computed.kv_mib:.4g}",
        "GPU memory, MiB": f"{max(memory) / MIB:.0f}" if memory else "not measured",
    }


def compute_cost(model: Model, arm: str, budget: int, measured: Sequence[Pass]) -> Cost:
    """By formula, from the kept tokens that the plugin reports, at the published depth.

    A base policy that ranks tokens by layers of the language model pays for these over all tokens.
    """
    kept = [entry.visual_tokens for entry in measured if entry.visual_tokens is not None]
    tokens = model.geometry.tokens if arm == FULL else round(mean(kept)) if kept else budget
    policy = BASE_POLICIES.get(arm)
    layers = policy.layers_read(policy.default_params, model.depth) if policy else 0
    return model.estimate(tokens, ranking_layers=layers)


_NOTES = (
    *ASSUMPTIONS,
    "TFLOPs and KV are computed for the published depth. Times are measured with the layers that "
    "are served, and include the whole vision tower: with fewer, their ratios are smaller.",
    "Tokens of the full model are counted as published: without a newline for each row.",
    "Prefill: mean of vLLM's request_prefill_time_seconds, which includes vision tower "
    "and selection. TTFT and decode: at the client, one request at a time, always a new image.",
    "Second question: median TTFT of a second question on each image, right after the first, "
    "and its ratio to the first. Without the plugin, and with policies that ignore questions, "
    "vLLM finds the image's KV in its prefix cache; policies that read the question reuse the "
    "output of the vision tower.",
    "GPU memory: the most that the workers had allocated during the requests. vLLM reserves "
    "its KV cache whatever is pruned, so this changes little; KV MiB is what one prompt needs "
    "of it.",
)


class Efficiency(FrozenModel):
    """The JSON file of a table."""

    model: str
    layers: int
    budget: int
    digests: Mapping[str, str | None]
    passes: Mapping[str, tuple[Pass | Refusal, ...]]
    environment: Mapping[str, str] = {}

    def times(self, name: str) -> dict[str, Floats]:
        """``ttft`` or ``again`` of each arm, all passes, without arms that were not served."""
        return {
            arm: np.asarray([t for entry in passes for t in getattr(entry, name)])
            for arm, passes in self.passes.items()
            if all(isinstance(entry, Pass) for entry in passes)
        }


_COLUMNS = (
    "arm", "a layer, ms", "all but the layers, ms", "TTFT, s", "prefill gain", "TTFT gain",
    "second question / first",
)  # fmt: skip


def compose(shallow: Efficiency, deep: Efficiency, depth: int) -> dict[str, tuple[Estimate, ...]]:
    """Figures of every arm at ``depth`` layers, as in :data:`_COLUMNS`, seconds and ratios.

    Gains are over the first arm. Intervals: 95 %, by bootstrap over requests, which are the same in
    every arm and at both depths. Raises :class:`BenchmarkError` where tables cannot be combined.
    """
    tables = [table.times(name) for table in (shallow, deep) for name in ("ttft", "again")]
    described = (shallow.model, shallow.budget, shallow.digests, list(tables[0]))
    if described != (deep.model, deep.budget, deep.digests, list(tables[2])):
        raise BenchmarkError(
            "the tables differ in model, budget, states or arms -> measure both again"
        )
    more = deep.layers - shallow.layers
    if more <= 0:
        raise BenchmarkError(
            f"depths {shallow.layers} and {deep.layers}: give the shallow one first"
        )
    counts = {len(times) for table in tables for times in table.values()}
    if len(counts) != 1:
        raise BenchmarkError(f"arms answered different numbers of requests: {sorted(counts)}")
    rows: Indices = resample(counts.pop(), DRAWS)

    def fit(low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Slope per layer and value at zero layers, for every resample."""
        below, above = medians(low, rows), medians(high, rows)
        slope = (above - below) / more
        return slope, below - slope * shallow.layers

    composed, reference = {}, None
    for arm in tables[0]:
        (layer, fixed), (layer_again, fixed_again) = (
            fit(tables[question][arm], tables[2 + question][arm]) for question in (0, 1)
        )
        ttft, again = fixed + layer * depth, fixed_again + layer_again * depth
        reference = reference or (layer, ttft)
        figures = (layer, fixed, ttft, reference[0] / layer, reference[1] / ttft, again / ttft)
        composed[arm] = tuple(map(estimate, figures))
    return composed


def _compose_files(shallow_file: Path, deep_file: Path) -> int:
    """Print the composed table."""
    try:
        shallow, deep = (
            Efficiency.model_validate_json(file.read_text()) for file in (shallow_file, deep_file)
        )
        depth = BACKBONE_SHAPES[shallow.model].layers
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BenchmarkError(f"not a table of benchmarks.cost efficiency: {reason}") from error
    styles = ((1000.0, 1), (1000.0, 0), (1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2))
    composed = compose(shallow, deep, depth)
    rows = [
        [arm, *(format_estimate(f, *s, " to ") for f, s in zip(figures, styles, strict=True))]
        for arm, figures in composed.items()
    ]
    print(
        f"{shallow.model}, K = {shallow.budget}; composed for {depth} language layers from "
        f"measurements of {shallow.layers} and {deep.layers}; "
        f"{len(next(iter(shallow.times('ttft').values())))} requests each\n"
    )
    print(Table("", _COLUMNS, rows, "l" + "r" * 6).markdown())
    return 0


def add_arguments(parser: argparse.ArgumentParser, command: str = "efficiency") -> None:
    """Add the options of a command."""
    add, names = parser.add_argument, (MINI, *_SHAPES)
    if command == "depth":
        add("shallow", type=Path, help="JSON file of the table with fewer layers")
        add("deep", type=Path, help="JSON file of the table with more layers")
        return
    add("--model", choices=names, default=MINI, help="checkpoint, or true shape without weights")
    add("--layers", type=int, default=2, help="language layers of a true shape")
    add("--budget", type=int, help="K (default: a ninth of the visual tokens)")
    add("--policies", default=",".join(_POLICIES), help="base policies to compare with")
    add("--state", default="autoprune", help="pruning state, a file or a name")
    add("--requests", type=int, default=20, help="timed requests a pass")
    add("--passes", type=int, default=1, help="passes over all arms (2: ABBA)")
    add("--kv-cache-gb", type=int, default=1, help="size of a CPU server's KV cache")
    add("--out", type=Path, default=Path("out/efficiency"), help="folder of files")


def run(options: argparse.Namespace) -> int:
    """0: every arm was served, or the tables are composed; 1: an arm was not served."""
    if options.command == "depth":
        return _compose_files(options.shallow, options.deep)
    model = _load_model(options.model, options.layers, options.out)
    budget = options.budget or model.geometry.tokens // 9
    # The same requests for every arm, each with another image of the published size.
    workload = Workload(
        model=SERVED,
        requests=options.requests,
        warm_up=2,
        output_tokens=16,
        sides={model.side: 1},
        aspects={"1/1": 1},
        words={16: 1},
        vocabulary="english" if model.name == MINI else "numbered",
    )
    requests = prepare(workload, options.out / f"requests-{model.name}")
    arms = _build_arms(model, options, budget)
    passes: dict[str, list[Pass | Refusal]] = {arm.name: [] for arm in arms}
    for number, arm in interleave(arms, options.passes):
        log = options.out / "servers" / f"{model.label}-{number}-{arm.name}.log"
        result = _measure(arm, requests, log)
        passes[arm.name].append(result)
        text = result.reason if isinstance(result, Refusal) else f"prefill {result.prefill:.3f} s"
        log_progress(f"{arm.name}: {text}")
    table = Efficiency(
        model=model.name,
        layers=model.geometry.layers,
        budget=budget,
        digests={arm.name: arm.digest for arm in arms},
        passes={name: tuple(entries) for name, entries in passes.items()},
        environment=environment(),
    )
    text = format_table(model, budget, passes)
    text += f"\n\nEnvironment: {format_environment(table.environment)}.\n"
    text += f"\nCommand: `{shlex.join(command_line())}`\n"
    (options.out / f"{model.label}.md").write_text(text)
    (options.out / f"{model.label}.json").write_text(table.model_dump_json(indent=1) + "\n")
    print(text)
    return int(any(isinstance(entry, Refusal) for row in passes.values() for entry in row))


def _build_arms(model: Model, options: argparse.Namespace, budget: int) -> list[Arm]:
    common = (
        "--served-model-name", SERVED, *model.flags, "--block-size", "32", "--enforce-eager",
        "--max-num-seqs", "8",
    )  # fmt: skip
    pruning = ["--autoprune-budget", str(budget)]
    if model.geometry.relevance == "clip":  # for shapes, one with random weights is written once
        tower = CLIP if model.name == MINI else write_clip(options.out / "clip")
        pruning += ["--autoprune-text-tower", str(tower)]
    kv = (("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gb)),)
    stock = Arm(name=FULL, model=str(model.folder), flags=common, environment=kv)
    states = {name: name for name in options.policies.split(",") if name}
    named = (states | {"AutoPrune": options.state}).items()
    return [stock, *(stock.prune(name, state, pruning) for name, state in named)]
