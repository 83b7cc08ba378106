"""A fake lmms-eval: asks a server four questions and writes the files of version 0.7.3.

It runs as a program. FAKE_VERSION, FAKE_DROP (samples left out), FAKE_EXIT and FAKE_ERROR (an
exception, after which it exits with 0) make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

GOLD = ("yes", "no", "yes", "no")


def ask(base_url: str, model: str, question: str) -> tuple[str, int]:
    """The answer and its prompt tokens; of a failure what lmms-eval writes, and none."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    if pruning := json.loads(os.environ["AUTOPRUNE_PRUNING"]):
        body["mm_processor_kwargs"] = {"autoprune": pruning}
    try:
        reply = httpx.post(f"{base_url}/chat/completions", json=body, timeout=10)
        content = reply.raise_for_status().json()
    except httpx.HTTPError as error:
        return f"[LMMS_EVAL_REQUEST_FAILED after 3 retries] {error}", 0
    return content["choices"][0]["message"]["content"], content["usage"]["prompt_tokens"]


def metrics(task: str, number: int, text: str) -> dict[str, Any]:
    if task == "mmvet":
        # As the real task: its judge is given an address, and one that fails is no error.
        judged = {"score": 0.8, "eval_model": os.environ.get("OPENAI_API_URL", "")}
        return {"gpt_eval_score": judged}
    right = float(text.strip().lower() == GOLD[number])
    if task == "gqa":
        return {"exact_match": right}
    kind, category = ("perception", "existence") if number < 2 else ("cognition", "code_reasoning")
    fields = {"question_id": f"{category}/1.jpg", "category": category}
    return {f"mme_{kind}_score": {**fields, "score": right}}


def totals(task: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    points: dict[str, Any] = {"alias": task}
    for name in ("exact_match", "gpt_eval_score", "mme_perception_score", "mme_cognition_score"):
        values = [sample[name] for sample in samples if name in sample]
        scores = [value["score"] if isinstance(value, dict) else value for value in values]
        if name.startswith("mme"):
            points[f"{name},none"] = 50 * sum(scores) + 100 * float(sum(scores) == 2)
        elif scores:
            scale = 100 if task == "mmvet" else 1
            points[f"{name},none"] = scale * sum(scores) / len(scores)
        points[f"{name}_stderr,none"] = "N/A"
    return points


def main() -> int:
    if sys.argv[1:] == ["version"]:
        print(f"lmms-eval {os.environ.get('FAKE_VERSION', '0.7.3')}\nPython     3.11")
        return 0
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "batch_size", "output_path"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--log_samples", action="store_true", required=True)
    parser.add_argument("--include_path")
    options = parser.parse_args()
    task, model_args = options.tasks, dict(p.split("=", 1) for p in options.model_args.split(","))
    if "FAKE_EXIT" in os.environ:
        print("CUDA error: out of patience")
        return int(os.environ["FAKE_EXIT"])
    if error := os.environ.get("FAKE_ERROR"):
        print(f"Error during evaluation: {error}. Please set `--verbosity=DEBUG`")
        return 0
    samples, images = [], []
    for number, gold in enumerate(GOLD):
        question = f"{task} {number}?"
        text, tokens = ask(model_args["base_url"], model_args["model_version"], question)
        counts = {"input_tokens": tokens, "output_tokens": int(tokens > 0), "reasoning_tokens": 0}
        samples.append({
            "doc_id": number, "target": gold, "filtered_resps": text, "token_counts": [counts],
            "doc_hash": "0", "input": question, **metrics(task, number, text),
        })  # fmt: skip
        # Two questions about each image.
        images.append({"task": task, "doc_id": number, "image": f"i{number // 2}"})
    summary = {
        "results": {task: totals(task, samples)},
        "configs": {task: {"metric_list": [{"metric": f"{task}_accuracy"}]}},
        "n-samples": {task: {"original": len(GOLD), "effective": len(GOLD)}},
    }
    folder = Path(options.output_path) / model_args["model_version"].split("/")[-1]
    folder.mkdir(parents=True)
    (folder / "20260101_000000_results.json").write_text(json.dumps(summary))
    written = samples[: len(GOLD) - int(os.environ.get("FAKE_DROP", "0"))]
    for path, records in (
        (Path(os.environ["AUTOPRUNE_IMAGES"]), images),
        (folder / f"20260101_000000_samples_{task}.jsonl", written),
    ):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
