"""A fake lmms-eval: asks a server a few questions and writes the files of version 0.7.3.

It runs as a program. FAKE_VERSION, FAKE_DROP (samples left out), FAKE_EXIT and FAKE_ERROR (an
exception, after which it exits with 0) make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

GOLD = ("yes", "no", "yes", "no")
STAMP = "20260101_000000"
FAILED = "[LMMS_EVAL_REQUEST_FAILED after 3 retries] "


def answer(base_url: str, model: str, question: str) -> tuple[str, dict[str, int]]:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    if pruning := json.loads(os.environ["AUTOPRUNE_PRUNING"]):
        body["mm_processor_kwargs"] = {"autoprune": pruning}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            content = json.load(reply)
    except OSError as error:
        return f"{FAILED}{error}", {"input_tokens": 0, "output_tokens": 0, "reasoning_tokens": 0}
    usage = content["usage"]
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": 1, "reasoning_tokens": 0}
    return str(content["choices"][0]["message"]["content"]), counts


def doc(task: str, number: int) -> dict[str, Any]:
    document: dict[str, Any] = {"question": f"{task} {number}?", "answer": GOLD[number]}
    if task == "mme":
        category = "existence" if number < 2 else "code_reasoning"
        return {**document, "category": category, "question_id": f"{category}/1.jpg"}
    return {**document, "index": number}


def metrics(task: str, doc: dict[str, Any], text: str) -> dict[str, Any]:
    if task == "mmvet":
        # As the real task: its judge is given an address, and one that fails is no error.
        judged = {"score": 0.8, "eval_model": os.environ.get("OPENAI_API_URL", "")}
        return {"gpt_eval_score": judged}
    right = float(text.strip().lower() == doc["answer"])
    if task == "gqa":
        return {"exact_match": right}
    if task == "mme":
        key = "perception" if doc["category"] == "existence" else "cognition"
        fields = {name: doc[name] for name in ("question_id", "category")}
        return {f"mme_{key}_score": {**fields, "score": right}}
    raise ValueError(task)


def results(task: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    if task == "gqa":
        mean = sum(sample["exact_match"] for sample in samples) / len(samples)
        return {"alias": task, "exact_match,none": mean, "exact_match_stderr,none": 0.1}
    if task == "mme":
        points = {}
        for name in ("mme_perception_score", "mme_cognition_score"):
            scores = [sample[name]["score"] for sample in samples if name in sample]
            points[f"{name},none"] = 50 * sum(scores) + 100 * float(sum(scores) == 2)
            points[f"{name}_stderr,none"] = "N/A"
        return {"alias": task, **points}
    if task == "mmvet":
        total = sum(sample["gpt_eval_score"]["score"] for sample in samples)
        return {"alias": task, "gpt_eval_score,none": 100 * total / len(samples)}
    raise ValueError(task)


def main() -> int:
    if sys.argv[1:] == ["version"]:
        print(f"lmms-eval {os.environ.get('FAKE_VERSION', '0.7.3')}\nPython     3.11")
        return 0
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "batch_size", "output_path"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--log_samples", action="store_true", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--include_path")
    options = parser.parse_args()
    model_args = dict(part.split("=", 1) for part in options.model_args.split(","))
    if "FAKE_EXIT" in os.environ:
        print("CUDA error: out of patience")
        return int(os.environ["FAKE_EXIT"])
    if "FAKE_ERROR" in os.environ:
        print(
            f"Error during evaluation: {os.environ['FAKE_ERROR']}. Please set `--verbosity=DEBUG`"
        )
        return 0
    count = min(options.limit or len(GOLD), len(GOLD))
    samples = []
    for number in range(count):
        question = doc(options.tasks, number)
        text, counts = answer(
            model_args["base_url"], model_args["model_version"], question["question"]
        )
        samples.append({
            "doc_id": number, "target": question["answer"], "filtered_resps": text,
            "token_counts": [counts], "doc_hash": "0", "input": question["question"],
            **metrics(options.tasks, question, text),
        })  # fmt: skip
    # Two questions about each image.
    images = [{"task": options.tasks, "doc_id": n, "image": f"i{n // 2}"} for n in range(count)]
    Path(os.environ["AUTOPRUNE_IMAGES"]).write_text(
        "".join(json.dumps(image) + "\n" for image in images)
    )
    summary = {
        "results": {options.tasks: results(options.tasks, samples)},
        "configs": {options.tasks: {"metric_list": [{"metric": f"{options.tasks}_accuracy"}]}},
        "n-samples": {options.tasks: {"original": len(GOLD), "effective": count}},
    }
    folder = Path(options.output_path) / model_args["model_version"].split("/")[-1]
    folder.mkdir(parents=True)
    (folder / f"{STAMP}_results.json").write_text(json.dumps(summary))
    written = samples[: count - int(os.environ.get("FAKE_DROP", "0"))]
    lines = "".join(json.dumps(sample) + "\n" for sample in written)
    (folder / f"{STAMP}_samples_{options.tasks}.jsonl").write_text(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
