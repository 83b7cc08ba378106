"""Files that lmms-eval writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vllm_autoprune.evaluation.lmms_benchmarks import Benchmark


def write_output(
    folder: Path, benchmark: Benchmark, samples: Sequence[tuple[str, bool, int]]
) -> None:
    """The files of one task: the text of each answer, whether it is right, and its prompt tokens.

    Boxes are logged as 0.7.3 logs them: true and answered box, and no score.
    """
    task = benchmark.task
    (metric,) = benchmark.metrics
    # IoU 1/3
    truth = [0.1, 0.1, 0.5, 0.5]
    beside = [0.3, 0.1, 0.7, 0.5]
    lines = []
    for number, (text, right, tokens) in enumerate(samples):
        box = {
            "answer": "cup",
            "ann_id": "7",
            "bbox": truth,
            "pred": truth if right else beside,
        }
        sample = {
            "doc_id": number,
            "filtered_resps": text,
            "resps": text,
            "token_counts": [{"input_tokens": tokens}],
            metric: box if "refcoco" in metric else float(right),
        }
        lines.append(json.dumps(sample))
    mean = sum(right for _, right, _ in samples) / len(samples)
    summary = {
        "results": {task: {f"{metric},none": mean}},
        "configs": {task: {"metric_list": [{"metric": metric}]}},
        "n-samples": {task: {"effective": len(samples)}},
    }
    (folder / f"now_samples_{task}.jsonl").write_text("\n".join(lines))
    (folder / "now_results.json").write_text(json.dumps(summary))
    images = [json.dumps({"doc_id": n, "image": str(n)}) for n in range(len(samples))]
    (folder / "images.jsonl").write_text("\n".join(images))
