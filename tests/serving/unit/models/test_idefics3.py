"""Processors of Idefics3 and SmolVLM: tokens of an image, and the text between its tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from transformers import SmolVLMImageProcessor
from vllm.exceptions import VLLMValidationError

from tests.serving.unit.api.tiny_processor import Sender, picture
from vllm_autoprune.backbones import find_backbone
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.comparisons import count_between
from vllm_autoprune.serving.models.idefics3 import PLACEHOLDERS
from vllm_autoprune.serving.shared.part_shares import split_over_parts

ARCHITECTURES = {
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
TILE = 9
"""Tokens of a tile of both tiny models."""
WHOLE = 4096
SIZES = {(260, 260): 4, (260, 130): 2, (130, 260): 2, (40, 400): 2, (1, 1): 4, (900, 650): 4}
"""Image size -> tiles beside the whole image."""

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", params=ARCHITECTURES)
def sender(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sender]:
    """Makes the processor of one tiny model from a budget and the server's processor options."""
    name: str = request.param
    folder = build(name, tmp_path_factory.mktemp(name))

    def make(budget: int, **options: object) -> Sender:
        architecture = ARCHITECTURES[name]
        return Sender(
            folder, budget, architecture=architecture, placeholder="<image>", options=options
        )

    return make


@pytest.mark.parametrize(("size", "tiles"), SIZES.items())
def test_each_tile_keeps_its_share_and_the_text_between_tiles_stays(
    sender: Callable[..., Sender], size: tuple[int, int], tiles: int
) -> None:
    images = [picture(*size)]
    whole, pruned = sender(WHOLE).send(images), sender(7).send(images)
    assert (whole.lengths, pruned.lengths) == ([TILE * (tiles + 1)], [7])
    token = PLACEHOLDERS.token(sender(7).info)
    shares = split_over_parts(7, [TILE] * (tiles + 1), [1] * (tiles + 1), first=-1)
    assert runs(pruned.prompt, token) == [share for share in shares if share]
    assert [i for i in pruned.prompt if i != token] == [i for i in whole.prompt if i != token]


def test_an_image_that_is_not_split_is_its_whole_view_alone(
    sender: Callable[..., Sender],
) -> None:
    """``do_image_splitting`` switched off for the server."""
    images = [picture(260, 260)]
    whole = sender(WHOLE, do_image_splitting=False).send(images)
    pruned = sender(4, do_image_splitting=False).send(images)
    token = PLACEHOLDERS.token(sender(4).info)
    assert runs(whole.prompt, token) == [TILE]
    assert runs(pruned.prompt, token) == [4]


def test_a_square_has_most_tokens(sender: Callable[..., Sender]) -> None:
    assert PLACEHOLDERS.count_largest(sender(7).info).tokens == TILE * 5


def test_vllm_takes_no_videos(sender: Callable[..., Sender]) -> None:
    frames = numpy.zeros((4, 56, 56, 3), dtype=numpy.uint8)
    with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
        sender(7).info.parse_mm_data({"video": frames})


@pytest.mark.parametrize(
    ("name", "tile", "patch", "scale"),
    [("idefics3-8b", 364, 14, 2), ("smolvlm2-2.2b", 384, 14, 3), ("smolvlm2-500m", 512, 16, 4)],
)
def test_shapes_have_the_tokens_of_a_square_image(
    name: str, tile: int, patch: int, scale: int
) -> None:
    """Tiles as the image processor counts them, of patches that are shuffled into tokens."""
    pixels = SmolVLMImageProcessor(
        size={"longest_edge": 4 * tile}, max_image_size={"longest_edge": tile}
    )
    tiles, _, _ = pixels.get_number_of_image_patches(1000, 1000)
    assert find_backbone(name).tokens == tiles * (tile // patch // scale) ** 2


def runs(prompt: list[int], token: int) -> list[int]:
    """Lengths of the runs of one token."""
    return [run for run in count_between(prompt, token) if run]
