"""``python -m benchmarks.minillava.any_resolution FROM TO``: convert mini-LLaVA to LLaVA-NeXT.

The weights stay identical. The one tensor that LLaVA-NeXT adds, the newline between rows of tiles,
is zero.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Json = dict[str, object]

# (height, width) in tiles, as in LLaVA-1.6.
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
_COPIED_FILES = ("generation_config.json", "tokenizer.json", "chat_template.jinja")


def _copy_json(source: Path, target: Path, name: str, changes: Json) -> Json:
    """Copy a JSON file with some of its fields replaced; returns the new content."""
    content: Json = json.loads((source / name).read_text()) | changes
    (target / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return content


def convert_to_llava_next(llava: Path, target: Path) -> None:
    """Write the LLaVA-1.5 checkpoint in folder `llava` as LLaVA-NeXT to folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    config: Json = json.loads((llava / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    assert isinstance(vision, dict) and isinstance(text, dict)
    side, width = int(vision["image_size"]), int(text["hidden_size"])
    pinpoints = [[rows * side, columns * side] for rows, columns in GRIDS]
    _copy_json(
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
    tiling: Json = {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": pinpoints,
        "do_pad": True,
    }
    images = _copy_json(llava, target, "preprocessor_config.json", processor | tiling)
    del images["processor_class"]
    _copy_json(llava, target, "processor_config.json", processor | {"image_processor": images})
    _copy_json(llava, target, "tokenizer_config.json", dict(processor))
    for name in _COPIED_FILES:
        shutil.copy(llava / name, target / name)


def main() -> None:
    """Parse the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llava", type=Path, metavar="FROM", help="a LLaVA-1.5 checkpoint")
    parser.add_argument("target", type=Path, metavar="TO", help="folder to write")
    arguments = parser.parse_args()
    convert_to_llava_next(arguments.llava, arguments.target)


if __name__ == "__main__":
    main()
