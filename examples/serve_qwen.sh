#!/usr/bin/env bash
# Qwen2.5-VL, at most 256 visual tokens an image, the same for every question. Further flags are passed on.
set -euo pipefail
exec vllm serve Qwen/Qwen2.5-VL-7B-Instruct \
    --autoprune-state cen_divprune \
    --autoprune-budget 256 \
    --autoprune-requests budget \
    "$@"
