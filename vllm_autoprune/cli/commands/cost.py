"""`cost`: FLOPs of prefill and bytes of KV cache for a backbone and budgets."""

from __future__ import annotations

import argparse

from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape, find_backbone
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_paragraph, format_table
from vllm_autoprune.cost import Cost, estimate_cost, list_assumptions


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
    shape = find_backbone(options.backbone)
    budgets: list[int] = options.tokens or [shape.tokens, shape.tokens // 9]
    rows = [
        estimate_cost(shape, k, text=options.text, full_layers=options.full_layers) for k in budgets
    ]
    if options.json:
        print(as_json(_record(shape, budgets, rows, options.full_layers)))
    else:
        print(_format_costs(shape, budgets, rows, options.full_layers))
    return 0


def _record(
    shape: BackboneShape, budgets: list[int], rows: list[Cost], full_layers: int
) -> dict[str, object]:
    return {
        "backbone": shape.name,
        "full_layers": full_layers,
        "rows": [
            {
                "tokens": k,
                "mean_over_layers": row.tokens,
                "last_layer": row.after,
                "text": row.text,
                "flops": row.flops,
                "teraflops": row.teraflops,
                "kv_bytes": row.kv_bytes,
                "kv_mib": row.kv_mib,
                "flops_ratio": rows[0].flops / row.flops,
                "kv_ratio": rows[0].kv_bytes / row.kv_bytes,
            }
            for k, row in zip(budgets, rows, strict=True)
        ],
        "assumptions": list(list_assumptions(shape)),
    }


def _format_costs(
    shape: BackboneShape, budgets: list[int], rows: list[Cost], full_layers: int
) -> str:
    head = ["visual tokens", "TFLOPs", "KV MiB", "fewer FLOPs", "less KV"]
    inside = [f"{row.after}, mean {row.tokens:.7g}" for row in rows]
    lines = [
        [
            str(k),
            f"{row.teraflops:#.4g}",
            f"{row.kv_mib:.7g}",
            f"{rows[0].flops / row.flops:.2f}x",
            f"{rows[0].kv_bytes / row.kv_bytes:.2f}x",
            *([where] if full_layers else []),
        ]
        for k, row, where in zip(budgets, rows, inside, strict=True)
    ]
    counted = f"{rows[0].text} text tokens counted too" if rows[0].text else "text not counted"
    title = (
        f"{shape.name}: L = {shape.layers}, d = {shape.width}, m = {shape.feed_forward}, "
        f"k = {shape.kv_width}; N = {shape.tokens} visual tokens an image; {counted}"
    )
    if full_layers:
        head.append(f"left after {full_layers} layers")
    notes = [format_paragraph(f"- {note}") for note in list_assumptions(shape)]
    return "\n".join([title, "", format_table(head, lines, ">>>>>>"), "", *notes])


COMMAND = Command(
    "print FLOPs of prefill and bytes of KV cache",
    _arguments,
    _run,
    epilog="Example: vllm-autoprune cost --backbone llava-next-7b --tokens 2880 320",
)
