"""`cost`: FLOPs of prefill and bytes of KV cache for a backbone and budgets."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_autoprune.backbones import BACKBONE_SHAPES, find_backbone
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_paragraph, format_table
from vllm_autoprune.cost import estimate_cost, list_assumptions


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backbone", required=True, metavar="NAME", help=", ".join(BACKBONE_SHAPES)
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="K",
        help="visual tokens of one image; the others are compared with the first "
        "(default: all tokens, and a ninth of them)",
    )
    parser.add_argument(
        "--text", type=int, default=0, metavar="T", help="text tokens counted too (default 0)"
    )
    parser.add_argument(
        "--full-layers",
        type=int,
        default=0,
        metavar="F",
        help="cost of a method that prunes inside the language model: F layers see all tokens, and "
        "the others so many that the average over layers is K",
    )


def _run(options: argparse.Namespace) -> int:
    shape, full_layers = find_backbone(options.backbone), options.full_layers
    budgets: list[int] = options.tokens or [shape.tokens, shape.tokens // 9]
    costs = [estimate_cost(shape, k, text=options.text, full_layers=full_layers) for k in budgets]
    assumptions = list_assumptions(shape)
    records: list[dict[str, Any]] = [
        {
            "tokens": k,
            "mean_over_layers": cost.tokens,
            "last_layer": cost.after,
            "text": cost.text,
            "flops": cost.flops,
            "teraflops": cost.teraflops,
            "kv_bytes": cost.kv_bytes,
            "kv_mib": cost.kv_mib,
            "flops_ratio": costs[0].flops / cost.flops,
            "kv_ratio": costs[0].kv_bytes / cost.kv_bytes,
        }
        for k, cost in zip(budgets, costs, strict=True)
    ]
    if options.json:
        about = {"backbone": shape.name, "full_layers": full_layers, "rows": records}
        print(as_json({**about, "assumptions": assumptions}))
        return 0
    head = ["visual tokens", "TFLOPs", "KV MiB", "fewer FLOPs", "less KV"]
    rows = [
        [str(row["tokens"]), f"{row['teraflops']:#.4g}", f"{row['kv_mib']:.7g}",
         f"{row['flops_ratio']:.2f}x", f"{row['kv_ratio']:.2f}x"]
        for row in records
    ]  # fmt: skip
    if full_layers:
        head.append(f"left after {full_layers} layers")
        for cells, cost in zip(rows, costs, strict=True):
            cells.append(f"{cost.after}, mean {cost.tokens:.7g}")
    counted = f"{options.text} text tokens counted too" if options.text else "text not counted"
    print(
        f"{shape.name}: L = {shape.layers}, d = {shape.width}, m = {shape.feed_forward}, "
        f"k = {shape.kv_width}; N = {shape.tokens} visual tokens an image; {counted}\n"
    )
    print(format_table(head, rows, ">>>>>>"), end="\n\n")
    print("\n".join(format_paragraph(f"- {note}") for note in assumptions))
    return 0


COMMAND = Command(
    "print FLOPs of prefill and bytes of KV cache",
    _arguments,
    _run,
    epilog="Example: vllm-autoprune cost --backbone llava-next-7b --tokens 2880 320",
)
