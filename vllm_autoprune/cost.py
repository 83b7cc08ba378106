"""Analytic cost of a prompt: FLOPs of prefill and bytes of KV cache.

The formulas are those of the efficiency table of the AutoPrune paper; :data:`ASSUMPTIONS` lists
what they count and what they leave out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_autoprune.backbones import BackboneShape
from vllm_autoprune.errors import ConfigError, Problem

TERA = 10**12
MIB = 2**20

ASSUMPTIONS = (
    "FLOPs = sum over layers of 2 x (n d (2 q + 2 k) + 2 n^2 q + 3 n d m): q, k, v and o "
    "projections, full n x n attention (no causal halving), three gated feed-forward matrices; "
    "a multiply-accumulate is 2 FLOPs.",
    "KV cache = sum over layers of n x 2 (key, value) x k x 2 bytes (16-bit); MiB = 2^20 bytes.",
    "n: tokens of one prompt in that layer; d: width, m: feed-forward width, k: key-value width, "
    "q: query width, which is d unless said otherwise.",
    "Language model only, prefill only: no vision tower, projector, embedding or output head. Of "
    "the selection, the layers of the language model that a policy runs over all tokens to rank "
    "them; nothing else.",
)


LINEAR_LAYERS = (
    "A layer of linear attention (gated delta net) has 2 x (n d (2 a + 3 v) + 3 n v h + 3 n d m): "
    "q, k, v, gate and output projections, and three products with a state of v x h a token, where "
    "a and v are the widths of keys and values and h that of one key head. Its state does not grow "
    "with the prompt and is not counted as KV cache. Gates of full attention are left out."
)


def list_assumptions(shape: BackboneShape) -> tuple[str, ...]:
    """What is counted for a backbone and what is left out."""
    return ASSUMPTIONS if shape.linear is None else (*ASSUMPTIONS, LINEAR_LAYERS)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one prompt."""

    tokens: float
    """Visual tokens, averaged over layers."""
    after: int
    """Visual tokens in the last layer, which decoding attends to."""
    text: int
    """Text tokens of the prompt."""
    flops: int
    """Floating-point operations of prefill."""
    kv_bytes: int
    """Bytes of KV cache."""

    @property
    def teraflops(self) -> float:
        """FLOPs in units of 10^12."""
        return self.flops / TERA

    @property
    def kv_mib(self) -> float:
        """KV cache in MiB."""
        return self.kv_bytes / MIB


def prefill_flops(shape: BackboneShape, schedule: tuple[int, ...]) -> int:
    """FLOPs of prefilling ``schedule[i]`` tokens in layer i."""
    d, m = shape.width, shape.feed_forward
    return sum(
        2 * (_attention_macs(shape, layer, n) + 3 * n * d * m) for layer, n in enumerate(schedule)
    )


def _attention_macs(shape: BackboneShape, layer: int, n: int) -> int:
    """Multiply-accumulates of n tokens in one layer, without its feed-forward."""
    d, k, q = shape.width, shape.kv_width, shape.queries
    linear = shape.linear_attention(layer)
    if linear is None:
        return n * d * (2 * q + 2 * k) + 2 * n * n * q
    a, v = linear.key_width, linear.value_width
    return n * d * (2 * a + 3 * v) + 3 * n * v * linear.key_head


def kv_bytes(shape: BackboneShape, schedule: tuple[int, ...]) -> int:
    """Bytes of the keys and values of ``schedule[i]`` tokens in layer i, 16 bits each."""
    return sum(
        n * 2 * shape.kv_width * 2
        for layer, n in enumerate(schedule)
        if shape.linear_attention(layer) is None
    )


def estimate_cost(
    shape: BackboneShape,
    tokens: int,
    *,
    text: int = 0,
    full_layers: int = 0,
    ranking_layers: int = 0,
) -> Cost:
    """Cost of K = ``tokens`` visual tokens and ``text`` text tokens.

    With ``full_layers`` = 0 every layer sees K visual tokens. With F > 0 it is the cost of a method
    that prunes inside the language model: F layers see all N tokens and the others R, the smallest
    number for which the mean over layers is at least K. Raises :class:`ConfigError` where the F
    full layers alone exceed a mean of K.

    ``ranking_layers`` run over all N tokens before the selection, in addition to the prefill.
    """
    _check_arguments(shape, tokens, text, full_layers)
    visual = (tokens,) * shape.layers
    if full_layers and tokens < shape.tokens:
        rest = tokens_after_full_layers(shape, tokens, full_layers)
        visual = (shape.tokens,) * full_layers + (rest,) * (shape.layers - full_layers)
    schedule = tuple(n + text for n in visual)
    return Cost(
        tokens=sum(visual) / shape.layers,
        after=visual[-1],
        text=text,
        flops=prefill_flops(shape, schedule)
        + prefill_flops(shape, (shape.tokens + text,) * ranking_layers),
        kv_bytes=kv_bytes(shape, schedule),
    )


def tokens_after_full_layers(shape: BackboneShape, tokens: int, full_layers: int) -> int:
    """Tokens after F full layers: R of ``F N + (L - F) R = L K``, rounded up."""
    used, allowed = full_layers * shape.tokens, shape.layers * tokens
    if used >= allowed:
        what = (
            f"{full_layers} layers of all {shape.tokens} tokens are {used} token-layers, but "
            f"{tokens} tokens on average over {shape.layers} layers are {allowed}"
        )
        raise ConfigError(
            f"cost on {shape.name}",
            [Problem("--full-layers", what, "give fewer full layers or more tokens")],
        )
    return math.ceil((allowed - used) / (shape.layers - full_layers))


def _check_arguments(shape: BackboneShape, tokens: int, text: int, full_layers: int) -> None:
    problems = []
    if tokens < 1:
        problems.append(
            Problem("--tokens", f"{tokens} is not a number of tokens", "give 1 or more")
        )
    if text < 0:
        problems.append(Problem("--text", f"{text} is not a number of tokens", "give 0 or more"))
    if not 0 <= full_layers < shape.layers:
        what = f"{full_layers} of {shape.layers} layers"
        fix = f"give 0 to {shape.layers - 1}"
        problems.append(Problem("--full-layers", what, fix))
    if problems:
        raise ConfigError(f"cost on {shape.name}", problems)
