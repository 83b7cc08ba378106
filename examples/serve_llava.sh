#!/usr/bin/env bash
# LLaVA-1.5, 64 of 576 visual tokens, chosen by the question. Further flags of vLLM are passed on.
set -euo pipefail
exec vllm serve llava-hf/llava-1.5-7b-hf \
    --autoprune-state minillava \
    --autoprune-budget 64 \
    --autoprune-text-tower openai/clip-vit-large-patch14-336 \
    --autoprune-requests budget \
    "$@"
