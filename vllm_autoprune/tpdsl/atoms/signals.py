"""Quality signals (S): each gives one score per token.

A signal is a function of its call, B images and the reference selection ``(B, P)`` in pick order.
It returns ``(B, N)`` float32, where larger is better. Signals are min-max normalised before fusion,
so only their order and relative gaps within an image matter. Each signal has a weight in the
fusion.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as functional
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.ops.similarity import (
    SETTLED,
    cosines_with,
    distance_to_neighbours,
    map_weight,
    mean_dissimilarity,
    mean_of_neighbours,
    scale_to_unit_variance,
    spherical_kmeans,
    strip_size,
)
from vllm_autoprune.ops.videos import (
    cosine_to_previous,
    distance_from_mean,
    echo_of_previous,
    surprise_of_motion,
)
from vllm_autoprune.tpdsl.registry import (
    AtomCall,
    OneOf,
    add_clauses,
    added,
    atom,
    run,
)
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens

ROUNDS = 5
"""Iterations of k-means in cluster_centroid_representativeness."""


class _SignalCall(AtomCall):
    """A scoring atom with its weight in the fusion."""

    weight: float = Field(
        1.0, ge=0.0, le=4.0, description="exponent or factor in the fusion"
    )

    @property
    def title(self) -> str:
        """Name of the signal in pictures: the atom's, or one for what a parameter makes of it."""
        return self.atom.replace("_", " ")


class Relevance(_SignalCall):
    """Parameters of instruction_guided_visual_relevance."""

    sign: Literal["auto", "+", "-"] = Field(
        "auto",
        description="sign of the cosine that means relevance; auto: as the backbone defines it",
    )
    reduce: Literal["mean", "max"] = Field(
        "mean",
        description="how text segments are combined; a question that fits the text tower is one "
        "segment, for which both are the same",
    )
    measure: Literal["instruction", "words", "negative_mean"] = added(
        "instruction",
        description="instruction: cosine with its text segments, by the text tower; words: cosine "
        "with the mean of the language model's embeddings of its words, where those are as wide as "
        "the token's features, else negative_mean; "
        "negative_mean: minus the mean of the token's channels, which reads no instruction",
    )

    @property
    def title(self) -> str:
        """Name of what is measured."""
        other = {"words": "relevance to words", "negative_mean": "minus mean channel"}
        return other.get(self.measure, super().title)

    def describe(self, doc: str) -> str:
        """What ``measure`` says, and how cosines are signed and combined."""
        if self.measure == "words":
            return "Cosine with the mean of the question's words, else minus the mean channel."
        if self.measure == "negative_mean":
            return "Minus the mean of the token's channels; reads no question."
        signed = {"auto": "signed cosine", "+": "cosine", "-": "minus the cosine"}
        doc = doc.replace("signed cosine", signed[self.sign])
        return add_clauses(
            doc, {", largest of its text segments": self.reduce == "max"}
        )


class _Attention(_SignalCall):
    temperature: float = Field(
        1.0, ge=0.25, le=4.0, description="above 1 flattens the attention distribution"
    )
    measure: Literal["attention", "norm_and_place"] = added(
        "attention",
        description="norm_and_place: 0.7 of the token's norm and 0.3 of exp(-distance from the "
        "centre in half tile widths), each normalised, in place of attention",
    )

    @property
    def title(self) -> str:
        """Name of what is measured."""
        return "norm and place" if self.measure == "norm_and_place" else super().title

    def describe(self, doc: str) -> str:
        """What ``measure`` says."""
        if self.measure == "attention":
            return doc
        return "0.7 of the token's norm, 0.3 of nearness to the centre; reads no attention."


class _Centrality(_SignalCall):
    sigma: float = Field(
        0.5, ge=0.15, le=2.0, description="width of the Gaussian, in half tile widths"
    )
    bias: float | None = added(
        None,
        ge=0.05,
        le=4.0,
        description="exp(-bias x distance in half tile widths); null: the Gaussian",
    )

    @property
    def title(self) -> str:
        """Name of the curve."""
        return super().title if self.bias is None else "exponential centrality"

    def describe(self, doc: str) -> str:
        """Which curve falls with the distance."""
        return (
            doc
            if self.bias is None
            else doc.replace("Gaussian of", "Exponential fall with")
        )


class _Redundancy(_SignalCall):
    m: int | None = Field(
        8,
        ge=1,
        le=64,
        description="number of most similar tokens in the mean; null: all others",
    )

    @property
    def title(self) -> str:
        """Name that tells whether all tokens count."""
        return super().title if self.m else "redundancy with all tokens"

    def describe(self, doc: str) -> str:
        """Which tokens count."""
        return doc.replace(
            "the m most similar other",
            f"the {self.m} most similar other" if self.m else "all other",
        )


class _Contrast(_SignalCall):
    radius: int = Field(
        1, ge=1, le=3, description="neighbourhood in tokens (Chebyshev distance)"
    )
    neighbours: Literal["window", "four_wrapped"] = added(
        "window",
        description="four_wrapped: distance from the mean direction of the four neighbours, those "
        "of a border on the opposite one; on a grid that is not square, of the 8 most similar "
        "tokens",
    )

    @property
    def title(self) -> str:
        """Name that tells which neighbours count."""
        wrapped = self.neighbours == "four_wrapped"
        return "contrast with four neighbours" if wrapped else super().title

    def describe(self, doc: str) -> str:
        """Which neighbours count."""
        if self.neighbours == "window":
            return doc
        return (
            "Distance from the mean direction of four neighbours, wrapped around the border; of "
            "the 8 most similar tokens where the grid is not square."
        )


class _Norm(_SignalCall):
    p: int = Field(
        2,
        ge=1,
        le=2,
        description="order of the norm: 1, sum of absolute values; 2, Euclidean",
    )

    @property
    def title(self) -> str:
        """Name of the norm."""
        return super().title if self.p == 2 else "sum of absolute values"

    def describe(self, doc: str) -> str:
        """Which norm it is."""
        kinds = {1: "sum of absolute values.", 2: "Euclidean."}
        return f"{doc.partition(':')[0]}: {kinds[self.p]}"


class _ClusterCentroid(_SignalCall):
    clusters: int = Field(
        16, ge=2, le=64, description="number of clusters of the image's features"
    )


class _GlobalMean(_SignalCall):
    scope: Literal["image", "tile"] = Field("image", description="tokens in the mean")

    @property
    def title(self) -> str:
        """Name that tells of a mean within the tile."""
        return super().title if self.scope == "image" else "likeness to the tile's mean"

    def describe(self, doc: str) -> str:
        """Which tokens are in the mean."""
        return f"Cosine to the mean direction of all tokens of the {self.scope}."


class _ChannelEntropy(_SignalCall):
    temperature: float = Field(
        1.0,
        ge=0.25,
        le=4.0,
        description="above 1 flattens the distribution over channels",
    )


class _Confidence(_SignalCall):
    floor: float = Field(
        0.0, ge=0.0, le=0.5, description="value of tokens that were not picked"
    )


class _Detail(_SignalCall):
    radius: int = Field(
        1, ge=1, le=3, description="the window has 2 radius + 1 tokens per side"
    )


class _Dissimilarity(_SignalCall):
    scale_variance: bool = Field(
        False, description="divide every channel by its deviation in the image first"
    )
    curve: Literal["minmax", "sigmoid"] = Field(
        "minmax",
        description="sigmoid: flattens the extremes, as Cen-Prune on Qwen2.5-VL",
    )

    @property
    def title(self) -> str:
        """Name with what is done before and after."""
        scaled = "scaled " if self.scale_variance else ""
        return (
            f"{scaled}{super().title}{', sigmoid' if self.curve == 'sigmoid' else ''}"
        )

    def describe(self, doc: str) -> str:
        """What is done to channels before, and to the mean after."""
        clauses = {
            ", of channels divided by their deviation": self.scale_variance,
            ", through a sigmoid": self.curve == "sigmoid",
        }
        return add_clauses(doc, clauses)


class _Echo(_SignalCall):
    tau: float = Field(
        0.5,
        ge=0.01,
        le=4.0,
        description="temperature of similarity to the frame before",
    )
    scope: Literal["frame", "local"] = Field(
        "frame",
        description="tokens of the frame before: all, or the 3 x 3 around the place",
    )

    @property
    def title(self) -> str:
        """Name that tells of a comparison around the place."""
        return super().title if self.scope == "frame" else "temporal echo nearby"

    def describe(self, doc: str) -> str:
        """Which tokens are compared."""
        return add_clauses(doc, {", around its place": self.scope == "local"})


class _Surprise(_SignalCall):
    decay: float = Field(
        0.9,
        ge=0.0,
        le=0.99,
        description="weight of the errors before in their running mean",
    )


Signal = Annotated[_SignalCall, OneOf("scoring")]


_RELEVANCE_NEEDS: dict[str, frozenset[Need]] = {
    "instruction": frozenset({"instruction"}),
    "words": frozenset({"words"}),
    "negative_mean": frozenset(),
}


@atom(
    "scoring",
    Relevance,
    needs=frozenset({"instruction", "words"}),
    reads=lambda call: _RELEVANCE_NEEDS[call.measure],
    cost=3.8,
)
def _instruction_guided_visual_relevance(
    call: Relevance, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Relevance to the instruction: signed cosine between the token and the instruction."""
    if call.measure == "words":
        words = tokens.require_words()
        if words.embeddings.shape[2] == tokens.features.shape[2]:
            used = words.used[:, :, None]
            pooled = words.embeddings.float().where(used, 0.0).sum(dim=1, keepdim=True)
            return cosines_with(tokens.features, pooled)[:, :, 0]
    if call.measure != "instruction":
        # Summed in strips, because a float32 copy of a whole image takes longer than the means.
        strips = tokens.features.split(strip_size(tokens.features), dim=1)
        return -torch.cat([strip.float().mean(dim=-1) for strip in strips], dim=1)
    sign = {"auto": None, "+": 1, "-": -1}[call.sign]
    return tokens.require_instruction().relevance(call.reduce, sign)


@atom(
    "scoring",
    _Attention,
    needs=frozenset({"cls_attention"}),
    reads=lambda call: frozenset(
        {"cls_attention"} if call.measure == "attention" else ()
    ),
    cost=0.1,
)
def _attention_proxy_saliency(
    call: _Attention, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Attention of [CLS] to each token; unknown: softmax of its part along the mean token."""
    if call.measure == "norm_and_place":
        central = torch.exp(-tokens.centre_distance)
        norm = min_max_normalise(tokens.norm[:, :, 0].float())
        return 0.7 * norm + 0.3 * min_max_normalise(central)
    if tokens.cls_attention is not None:
        return tokens.cls_attention.float().clamp_min(0) ** (1.0 / call.temperature)
    features = tokens.features.float()
    mean = functional.normalize(features.mean(dim=1, keepdim=True), dim=-1)
    return ((features * mean).sum(dim=-1) / call.temperature).softmax(dim=-1)


@atom("scoring", _Centrality, cost=0.1)
def _spatial_centrality_prior(
    call: _Centrality, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Gaussian of the token's distance from the centre of its tile."""
    grid = tokens.grid
    device = tokens.features.device
    if call.bias is not None:
        prior = torch.exp(-call.bias * tokens.centre_distance)
        return prior.expand(tokens.batch, tokens.count)
    y = (torch.arange(grid.height, device=device) * 2 + 1) / grid.height - 1
    x = (torch.arange(grid.width, device=device) * 2 + 1) / grid.width - 1
    squared = y[:, None] ** 2 + x[None, :] ** 2
    prior = torch.exp(-squared / (2 * call.sigma**2)).flatten()
    prior = tokens.at_tokens(prior[None]).repeat(1, grid.tiles)
    return prior.expand(tokens.batch, tokens.count)


@atom("scoring", _Redundancy, cost=1.3)
def _redundancy_density_penalty(
    call: _Redundancy, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Negative mean cosine to the m most similar other tokens of the tile or image."""
    cosine = tokens.cosine if tokens.tile_scope == "global" else tokens.tile_cosine
    count = cosine.shape[-1] - 1
    m = count if call.m is None else min(call.m, count)
    if m == 0:
        return torch.zeros(tokens.batch, tokens.count, device=cosine.device)
    if call.m is None:
        return tokens.by_image(
            -(cosine.sum(dim=-1) - cosine.diagonal(dim1=1, dim2=2)) / count
        )
    # One of the m + 1 largest entries is surplus. It is the diagonal entry if that is at least the
    # smallest of them, and otherwise that smallest one.
    values = cosine.topk(m + 1, dim=-1).values
    surplus = torch.maximum(cosine.diagonal(dim1=1, dim2=2), values[..., -1])
    return tokens.by_image(-((values.sum(dim=-1) - surplus) / m))


@atom("scoring", _Contrast, cost=1.1)
def _local_contrast_saliency(
    call: _Contrast, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """One minus the mean cosine to the tokens within the radius on the grid."""
    # The per-tile cosines are cached, so the features are not read again.
    grid = tokens.grid
    cosine = tokens.at_places(tokens.tile_cosine)
    if call.neighbours == "four_wrapped":
        distance = distance_to_neighbours(cosine, grid.height, grid.width)
    else:
        distance = 1 - mean_of_neighbours(cosine, grid.height, grid.width, call.radius)
    return tokens.by_image(tokens.at_tokens(distance))


@atom("scoring", _Norm, cost=2.9)
def _visual_token_norm_saliency(
    call: _Norm, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Norm of the token's feature vector: Euclidean or sum of absolute values."""
    if (
        tokens.merged is not None
    ):  # before the merger: of a token's patches, not of their mean
        return tokens.require_merger_input().norms[:, :, call.p - 1].float()
    if call.p == 2:
        return tokens.norm[:, :, 0].float()
    return tokens.features.float().abs().sum(dim=-1)


@atom("scoring", _ClusterCentroid, cost=3.6)
def _cluster_centroid_representativeness(
    call: _ClusterCentroid, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Cosine to the centroid of the token's cluster (spherical k-means on features)."""
    return spherical_kmeans(tokens.cosine, call.clusters, ROUNDS)[1].amax(dim=2)


@atom("scoring", _GlobalMean, origin="listed", cost=0.2)
def _global_mean_representativeness(
    call: _GlobalMean, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Cosine to the mean direction of all tokens of the image, or of the tile."""
    cosine = tokens.cosine if call.scope == "image" else tokens.tile_cosine
    along = cosine.sum(dim=-1)
    length = along.sum(dim=-1, keepdim=True).clamp_min(SETTLED).sqrt()
    return tokens.by_image(along / length)


@atom("scoring", _ChannelEntropy, origin="listed", cost=13.3)
def _channel_entropy_informativeness(
    call: _ChannelEntropy, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Entropy of the softmax over absolute channel values, divided by its maximum."""
    logs = (tokens.features.float().abs() / call.temperature).log_softmax(dim=-1)
    return -(logs.exp() * logs).sum(dim=-1) / math.log(max(2, logs.shape[-1]))


def pick_confidence(picks: Tensor, count: int) -> Tensor:
    """``1 - rank / P`` for picks ``(B, P)`` in pick order, 0 for other tokens: ``(B, count)``."""
    batch, picked = picks.shape
    falling = 1 - torch.arange(picked, device=picks.device, dtype=torch.float32) / max(
        1, picked
    )
    none = torch.zeros(batch, count, device=picks.device)
    return none.scatter_(1, picks, falling.expand(batch, -1))


@atom("scoring", _Confidence, origin="listed", cost=0.1)
def _reference_selection_confidence(
    call: _Confidence, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Rank of the token among the base policy's picks: 1 for the first, falling to the floor."""
    return call.floor + (1 - call.floor) * pick_confidence(picks, tokens.count)


@atom("scoring", _Detail, origin="extension", cost=13.6)
def _local_detail_energy(call: _Detail, tokens: VisualTokens, picks: Tensor) -> Tensor:
    """Variance of feature directions in a window: high on text, edges and texture."""
    # The variance of unit vectors in a window is one minus the mean of their pairwise cosines,
    # which two average poolings of the cached cosines give.
    grid = tokens.grid
    means = tokens.at_places(tokens.tile_cosine)
    for _ in range(2):
        maps = means.reshape(-1, 1, grid.height, grid.width)
        side = 2 * call.radius + 1
        pooled = functional.avg_pool2d(
            maps, side, 1, call.radius, count_include_pad=False
        )
        means = pooled.reshape(means.shape).transpose(1, 2)
    return tokens.by_image(tokens.at_tokens(1 - means.diagonal(dim1=1, dim2=2)))


@atom("scoring", _Dissimilarity, origin="extension", cost=9.5)
def _mean_dissimilarity_saliency(
    call: _Dissimilarity, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Minus the mean cosine to all other tokens of the tile or image (Cen-Prune's weight)."""
    across = tokens.tile_scope == "global"
    rows = (tokens.features if across else tokens.by_tile(tokens.features)).float()
    if call.scale_variance:
        rows = scale_to_unit_variance(rows)
    tiles = 1 if across else tokens.grid.tiles
    return tokens.by_image(map_weight(mean_dissimilarity(rows, tiles), call.curve))


@atom("scoring", _SignalCall, origin="extension", videos=True, cost=9.4)
def _temporal_novelty(call: _SignalCall, tokens: VisualTokens, picks: Tensor) -> Tensor:
    """One minus the cosine with the token at the same place of the frame before."""
    return tokens.map_videos(lambda video: 1 - cosine_to_previous(video, initial=-1.0))


@atom("scoring", _Echo, origin="extension", videos=True, cost=18.5)
def _temporal_echo_penalty(call: _Echo, tokens: VisualTokens, picks: Tensor) -> Tensor:
    """Minus the mean cosine with the most similar tokens of the frame before."""
    width = tokens.grid.width if call.scope == "local" else 0
    return tokens.map_videos(
        lambda video: -echo_of_previous(video, call.tau, -1.0, width)
    )


@atom("scoring", _Surprise, origin="extension", videos=True, cost=14.1)
def _prediction_surprise(
    call: _Surprise, tokens: VisualTokens, picks: Tensor
) -> Tensor:
    """Error of predicting a token from the two frames before, relative to what it mostly is."""
    height = tokens.grid.height
    width = tokens.grid.width
    decay = call.decay
    return tokens.map_videos(
        lambda video: surprise_of_motion(video, height, width, decay)
    )


@atom("scoring", _SignalCall, origin="extension", videos=True, cost=9.4)
def _frame_outlier(call: _SignalCall, tokens: VisualTokens, picks: Tensor) -> Tensor:
    """One minus the cosine with the mean token of the frame, or of the tile."""
    return tokens.map_videos(distance_from_mean)


def run_signal(call: _SignalCall, tokens: VisualTokens, picks: Tensor) -> Tensor:
    """Compute the signal of a call, ``(B, N)`` float32."""
    return run(Tensor, call, tokens, picks).float()
