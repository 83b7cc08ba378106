# vLLM's own image with the plugin in it. Build from the repository: docker build -t vllm-autoprune .
# The version of vLLM is one of those that pyproject.toml allows.
ARG VLLM_VERSION=v0.32.0

FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE vllm_autoprune_command.py ./
COPY vllm_autoprune ./vllm_autoprune
COPY offline_search ./offline_search
COPY policies ./policies
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# The load test, which needs no vLLM: docker build --target load -t vllm-autoprune-load .
FROM python:3.12-slim AS load
WORKDIR /src
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch
RUN pip install --no-cache-dir "locust>=2.40,<3" "matplotlib>=3.10,<4" "jinja2>=3.1,<4" "rich>=14" \
    "httpx>=0.28,<1" "pydantic>=2.12,<3" numpy pillow prometheus-client
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl && rm -r /dist
COPY benchmarks ./benchmarks

# hadolint ignore=DL3006
FROM vllm/vllm-openai:${VLLM_VERSION}
COPY --from=build /dist /dist
# --no-deps: the image has every dependency, in the versions that vLLM was built with.
RUN uv pip install --system --no-deps /dist/*.whl && rm -r /dist && vllm-autoprune validate cdpruner
# The entry point is vLLM's, `vllm serve`: docker run ... vllm-autoprune MODEL --autoprune-state cdpruner
