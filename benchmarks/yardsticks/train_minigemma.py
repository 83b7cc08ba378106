"""``python -m benchmarks.yardsticks.train_minigemma``: train mini-Gemma from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from benchmarks.yardsticks import naming, tiled_training, tiles, training
from benchmarks.yardsticks.examples import CHECKPOINTS
from benchmarks.yardsticks.pictures import FIELD_WEIGHTS
from benchmarks.yardsticks.tiled_training import Pictures, TiledTrainer

_GEMMA = CHECKPOINTS["minigemma"]

# Standard deviation of the tower's and the projector's weights; the projector's would be zero.
_TOWER_SCALE = 0.05
_PROJECTOR_SCALE = 0.06
# Weights of norms, which Gemma states as differences from 1: of the queries and keys of heads that
# start by matching, and of the outputs of untrained feed-forward layers, which would drown others.
_MATCH_SCALE = 0.9
_MLP_SCALE = -0.8
# Number of rotary frequencies that turn by more than an image is long, by the kind of layer.
_FAST_FREQUENCIES = {"sliding_attention": 7, "full_attention": 5}


class _Trainer(TiledTrainer):
    """mini-Gemma; in half of the images of its answers, tokens see each other.

    In the others they see those before them only, as in vLLM on a CPU, whose attention has no such
    mask.
    """

    key = "minigemma"
    sizes = (tiles.SQUARE,)
    end = "<end_of_turn>"
    pad = "<pad>"
    tells_places = True

    def build_model(self) -> Gemma3ForConditionalGeneration:
        """The untrained model, whose heads start by attending to neighbours and to words."""
        model = Gemma3ForConditionalGeneration(AutoConfig.from_pretrained(_GEMMA))
        tower = model.model.vision_tower
        language = model.model.language_model
        language.config._attn_implementation = training.IN_PLACE
        projection = model.model.multi_modal_projector.mm_input_projection_weight
        nn.init.normal_(projection, std=_PROJECTOR_SCALE)
        for module in tower.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=_TOWER_SCALE)
        blocks = tower.encoder.layers
        with torch.no_grad():
            tiled_training.start_by_looking(
                tower.embeddings.position_embedding.weight,
                [block.self_attn for block in blocks],
                [
                    tower.embeddings.patch_embedding,
                    *(block.self_attn.out_proj for block in blocks),
                    *(block.mlp.fc2 for block in blocks),
                ],
            )
            naming.start_by_matching(language)
            for layer in language.layers:
                attention = layer.self_attn
                naming.skip_frequencies(
                    attention, _FAST_FREQUENCIES[attention.layer_type]
                )
                attention.q_norm.weight.fill_(_MATCH_SCALE)
                attention.k_norm.weight.fill_(_MATCH_SCALE)
                layer.post_feedforward_layernorm.weight.fill_(_MLP_SCALE)
        return model

    def label_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy on labels of patches, and of tokens, which are the means of their patches.

        Without the latter, patches of the background could say anything of colours and digits, and
        with it drown, in the mean, the only patch that shows them.
        """
        tokens = labels.unflatten(2, states.shape[1:3]).amax(3)
        loss = self.heads.loss(states.mean(2), tokens, FIELD_WEIGHTS)
        return super().label_loss(states, labels) + loss

    def project(self, drawn: Pictures, patches: Tensor) -> Tensor:
        """Rows (B, N, D) of the mean state of a token's patches."""
        rows: Tensor = self.model.model.multi_modal_projector(patches)
        return rows

    def find_mutual(self, start: int, stop: int) -> slice:
        """The positions of an image, whose tokens see each other in every other sequence."""
        return slice(start, stop)

    def list_modules(self) -> dict[str, nn.Module]:
        """Modules by prefix; a tower has the one that it has in published checkpoints."""
        model = self.model.model
        return {
            "model.vision_tower.vision_model.": model.vision_tower,
            "model.multi_modal_projector.": model.multi_modal_projector,
            "model.language_model.": model.language_model,
        }


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    tiled_training.train(run, _Trainer)


if __name__ == "__main__":
    raise SystemExit(training.Training.start("minigemma", train))
