"""Videos written for a test."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image


def write_frames(folder: Path, count: int, size: tuple[int, int] = (56, 28)) -> Path:
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", size, (5 * number, 0, 0)).save(folder / f"{number:03}.png")
    return folder


def write_video(path: Path, frames: int) -> Path:
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 8.0, (112, 84))
    for number in range(frames):
        video.write(np.full((84, 112, 3), 6 * number, np.uint8))
    video.release()
    return path
