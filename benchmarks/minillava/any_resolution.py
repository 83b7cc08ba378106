"""``python -m benchmarks.minillava.any_resolution FROM TO``: a LLaVA-NeXT of one's own.

Knows nothing about training: weights are a LLaVA-1.5 checkpoint's to the last bit. The one tensor
that LLaVA-NeXT has on top, the newline between rows of tiles, is zero.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Json = dict[str, object]

# (height, width) in tiles, as LLaVA-1.6 has them.
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
_UNCHANGED = ("generation_config.json", "tokenizer.json", "chat_template.jinja")


def _edited(source: Path, target: Path, name: str, changes: Json) -> Json:
    """Copy a JSON file with some of its fields replaced; returns what was written."""
    content: Json = json.loads((source / name).read_text()) | changes
    (target / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return content


def any_resolution(llava: Path, target: Path) -> None:
    """Write the LLaVA-NeXT checkpoint `target` that has the weights of the checkpoint `llava`."""
    target.mkdir(parents=True, exist_ok=True)
    config: Json = json.loads((llava / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    assert isinstance(vision, dict) and isinstance(text, dict)
    side, width = int(vision["image_size"]), int(text["hidden_size"])
    pinpoints = [[rows * side, columns * side] for rows, columns in GRIDS]
    _edited(
        llava,
        target,
        "config.json",
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_grid_pinpoints": pinpoints,
        },
    )
    tensors = load_file(llava / "model.safetensors")
    tensors["image_newline"] = torch.zeros(width, dtype=torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    processor = {"processor_class": "LlavaNextProcessor"}
    tiled: Json = {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": pinpoints,
        "do_pad": True,
    }
    pictures = _edited(llava, target, "preprocessor_config.json", processor | tiled)
    del pictures["processor_class"]
    _edited(llava, target, "processor_config.json", processor | {"image_processor": pictures})
    _edited(llava, target, "tokenizer_config.json", dict(processor))
    for name in _UNCHANGED:
        shutil.copy(llava / name, target / name)


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llava", type=Path, metavar="FROM", help="a LLaVA-1.5 checkpoint")
    parser.add_argument("target", type=Path, metavar="TO", help="folder to write")
    arguments = parser.parse_args()
    any_resolution(arguments.llava, arguments.target)


if __name__ == "__main__":
    main()
