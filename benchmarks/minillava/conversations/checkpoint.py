"""``python -m benchmarks.minillava.conversations.checkpoint FOLDER``: write the checkpoint.

Only its projector and language model are committed; everything else is that of the first
checkpoint, from which they were trained.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.minillava.split import CHECKPOINT
from vllm_autoprune.cli.output import CommandParser

LANGUAGE = Path(__file__).resolve().parent / "language.safetensors"


def write_checkpoint(folder: Path, language: Path = LANGUAGE) -> None:
    """Write `folder/llava` and `folder/clip`: the first checkpoint with another language model."""
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    weights = folder / "llava" / "model.safetensors"
    first, own = load_file(weights), load_file(language)
    if unknown := own.keys() - first.keys():
        raise ValueError(f"{language.name} has tensors that the model lacks: {sorted(unknown)}")
    save_file(first | own, weights, metadata={"format": "pt"})


def main() -> None:
    """Parse the arguments and write the folder."""
    parser = CommandParser(
        description="Write mini-LLaVA with the language model trained on conversations."
    )
    parser.add_argument("folder", type=Path, help="receives llava/ and clip/")
    parser.add_argument("--language", type=Path, default=LANGUAGE, help="trained tensors")
    options = parser.parse_args()
    write_checkpoint(options.folder, options.language)


if __name__ == "__main__":
    main()
