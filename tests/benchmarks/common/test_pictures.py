"""Pictures have the statistics of photographs and are determined by their seed."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from benchmarks.common.pictures import draw_picture, encode_picture

SIDE = 256


def slope(pixels: NDArray[np.float64]) -> float:
    """Exponent of the power spectrum over spatial frequency; photographs lie near -2."""
    spectrum = np.abs(np.fft.fftshift(np.fft.fft2(pixels - pixels.mean()))) ** 2
    down, right = np.indices(spectrum.shape) - SIDE // 2
    ring = np.hypot(down, right).astype(int).ravel()
    power = np.bincount(ring, spectrum.ravel()) / np.bincount(ring)
    band = np.arange(4, 64)
    return float(np.polyfit(np.log(band), np.log(power[band]), 1)[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_power_falls_with_frequency_as_in_photographs(seed: int) -> None:
    grey = np.asarray(draw_picture(seed, SIDE, SIDE).convert("L"), dtype=np.float64)
    assert -3.2 < slope(grey) < -1.6
    noise = np.random.default_rng(seed).uniform(0, 255, (SIDE, SIDE))
    assert abs(slope(noise)) < 0.2


def test_pictures_compress_better_than_noise() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    drawn, random = (
        encode_picture(i, "jpeg") for i in (draw_picture(0, SIDE, SIDE), Image.fromarray(noise))
    )
    assert 2 * len(drawn) < len(random)


def test_the_seed_determines_every_pixel() -> None:
    drawn = np.asarray(draw_picture(7, 80, 60))
    assert drawn.shape == (60, 80, 3)
    assert (drawn == np.asarray(draw_picture(7, 80, 60))).all()
    assert (drawn != np.asarray(draw_picture(8, 80, 60))).any()


def test_data_urls_contain_the_picture_in_its_format() -> None:
    picture = draw_picture(1, 64, 48)
    head, _, data = encode_picture(picture, "png").partition(",")
    decoded = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and decoded.format == "PNG"
    assert (np.asarray(decoded) == np.asarray(picture)).all()
    assert encode_picture(picture, "jpeg").startswith("data:image/jpeg;base64,")
