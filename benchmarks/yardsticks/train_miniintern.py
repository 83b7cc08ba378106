"""``python -m benchmarks.yardsticks.train_miniintern``: train mini-InternVL from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, InternVLForConditionalGeneration

from benchmarks.yardsticks import naming, tiled_training, tiles, training
from benchmarks.yardsticks.examples import CHECKPOINTS
from benchmarks.yardsticks.tiled_training import Pictures, TiledTrainer

_INTERN = CHECKPOINTS["miniintern"]

# Heads that start by matching have queries and keys so much larger than others, because a token has
# a cosine of about a half with each word for what it shows. They do not read the fastest rotary
# frequencies, which turn by more than an image is long: with those they gave half as much attention
# to the tokens that show a word.
_MATCH_SCALE = 3.8
_FAST_FREQUENCIES = 5


class _Trainer(TiledTrainer):
    """mini-InternVL, whose towers' first state is that of [CLS]."""

    key = "miniintern"
    sizes = tiles.SIZES
    end = "<|im_end|>"
    pad = "<|endoftext|>"
    before_patches = 1

    def build_model(self) -> InternVLForConditionalGeneration:
        """The untrained model, whose heads start by attending to neighbours and to words."""
        model = InternVLForConditionalGeneration(AutoConfig.from_pretrained(_INTERN))
        tower = model.model.vision_tower
        language = model.model.language_model
        for part in (tower, language):
            part.config._attn_implementation = training.IN_PLACE
        blocks = tower.encoder.layer
        with torch.no_grad():
            tiled_training.start_by_looking(
                tower.embeddings.position_embeddings[0, 1:],
                [block.attention for block in blocks],
                [
                    tower.embeddings.patch_embeddings.projection,
                    *(block.attention.projection_layer for block in blocks),
                    *(block.mlp.fc2 for block in blocks),
                ],
            )
            naming.start_by_matching(language)
            for layer in language.layers:
                attention = layer.self_attn
                naming.skip_frequencies(attention, _FAST_FREQUENCIES)
                rows = naming.MATCH_HEADS * attention.head_dim
                for projection in (attention.q_proj, attention.k_proj):
                    projection.weight[:rows] *= _MATCH_SCALE
        return model

    def project(self, drawn: Pictures, patches: Tensor) -> Tensor:
        """Rows (B, N, D) of the states of a token's patches, joined."""
        states = drawn.join_views(patches)
        rows: Tensor = self.model.model.multi_modal_projector(states.flatten(2))
        return rows


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    tiled_training.train(run, _Trainer)


if __name__ == "__main__":
    raise SystemExit(training.Training.start("miniintern", train))
