"""Runs a program that selects tokens on the images and questions of a batch."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue, StrictInt, TypeAdapter, ValidationError
from torch import Tensor

from offline_search.candidates.selection_program import SelectionProgram
from offline_search.programs.runner import run_sandboxed
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import VisualTokens

SIGNALS = {
    "reference": "(K,) the base policy's picks, in its order",
    "relevance": "(N,) similarity of each token to the question",
    "attention": "(N,) attention that the vision tower pays to each token",
    "row": "(N,) row of each token in the image",
    "column": "(N,) column of each token in the image",
}
"""What a program is given beside the features, by name."""

_CHARACTERS_PER_INDEX = 8

_SELECTIONS = TypeAdapter(list[list[StrictInt]])


async def select_with_program(
    program: SelectionProgram, tokens: VisualTokens, base_policy: str, budget: int
) -> Tensor:
    """Indices ``(B, K)`` in ascending order, of a batch of B images, each with its question.

    Raises :class:`SelectionError` where the program fails or returns anything but K different
    indices of each image.
    """
    if budget >= tokens.count:
        return torch.arange(tokens.count).expand(tokens.batch, -1)
    request: dict[str, JsonValue] = {
        "budget": budget,
        "images": list(_describe_images(tokens, base_policy, budget)),
        "numpy": str(Path(np.__file__).parents[1]),
    }
    limit = 1000 + _CHARACTERS_PER_INDEX * budget * tokens.batch
    output = await run_sandboxed(program.code, request, limit)
    if output.failure:
        raise SelectionError(output.failure)
    selections = _parse_selections(output.text, tokens.batch)
    for indices in selections:
        if len(indices) != budget or len(set(indices)) != budget:
            raise SelectionError(
                f"select returned {len(set(indices))} different indices instead of {budget}"
            )
        if not 0 <= min(indices) <= max(indices) < tokens.count:
            raise SelectionError(f"select returned an index outside 0 to {tokens.count - 1}")
    return torch.tensor(selections).sort(1).values


def _parse_selections(text: str, images: int) -> list[list[int]]:
    """The indices of each image; a program that writes to the output itself may leave any text."""
    try:
        selections = _SELECTIONS.validate_json(text)
    except ValidationError:
        raise SelectionError("the output is no list of indices for each image") from None
    if len(selections) != images:
        raise SelectionError(f"the output has {len(selections)} selections for {images} images")
    return selections


def _describe_images(tokens: VisualTokens, base_policy: str, budget: int) -> list[JsonValue]:
    """Features and signals of each image, encoded for the sandbox."""
    policy = BASE_POLICIES[base_policy]
    with torch.no_grad():
        signals = {"reference": policy.select_picks(policy.default_params, tokens, budget)}
        if tokens.instruction is not None:
            instruction = tokens.instruction
            present = instruction.segments[:, None].float()
            mean = (instruction.cosines * present).sum(2) / present.sum(2)
            signals["relevance"] = instruction.sign * mean
    if tokens.cls_attention is not None:
        signals["attention"] = tokens.cls_attention
    places = torch.arange(tokens.count).expand(tokens.batch, -1)
    signals["row"] = places // tokens.grid.width
    signals["column"] = places % tokens.grid.width
    return [
        {
            "features": _encode_array(tokens.features[image]),
            "signals": {name: _encode_array(values[image]) for name, values in signals.items()},
        }
        for image in range(tokens.batch)
    ]


def _encode_array(values: Tensor) -> JsonValue:
    whole = not values.is_floating_point()
    array = values.detach().cpu().to(torch.int64 if whole else torch.float32).contiguous().numpy()
    data = base64.b64encode(array.tobytes()).decode()
    return {"type": str(array.dtype), "shape": list(array.shape), "data": data}
