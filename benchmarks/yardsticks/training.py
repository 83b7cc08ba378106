"""Shared parts of all trainings: stages, the optimiser, dense labels, texts and their loss.

The random draws of a step depend only on seed, stage and step, so one seed gives bit-identical
weights.
"""

from __future__ import annotations

import math
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from benchmarks.common.command import run_command
from benchmarks.yardsticks.questions import Model, Question
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.record_file import FrozenModel

PARTS = 2
"""Number of batches of a step, whose gradients are averaged; each is computed by a thread."""
UNLABELLED = -1

_LOG_EVERY = 50
# Matrices that AdamW updates, because orthogonal steps do not help embeddings and classifier heads.
_TABLES = ("embed", "lm_head", "heads")
# Values of `blocks` for the shared prefix and for padding.
_PREFIX = -1
_PADDING = -2
_NOWHERE = slice(0)


class _Stage(FrozenModel):
    """One stage of a recipe; `recipes.toml` explains the fields."""

    name: str
    steps: int
    images: int
    peak: float
    warmup: int
    fall: float
    views: tuple[float, ...] = ()

    def rate(self, step: int) -> float:
        """Learning rate of a step: it warms up, stays, and falls to 2 % of its peak at the end.

        It falls late, after the kinds of question that take longest to learn have begun to improve.
        """
        progress = step / self.steps
        share = 1.0
        if step < self.warmup:
            share = (step + 1) / self.warmup
        elif progress >= 1 - self.fall:
            share = 0.02 + 0.98 * (1 - progress) / self.fall
        return self.peak * share


class Recipe(FrozenModel):
    """Stages of a training, and relative frequencies of kinds by content of the picture."""

    stages: tuple[_Stage, ...]
    questions: Mapping[str, Mapping[str, int]]
    phrases: Mapping[str, Mapping[str, int]]

    @classmethod
    def read(cls, model: Model) -> Recipe:
        """Read the recipe of a model."""
        path = Path(__file__).with_name("recipes.toml")
        return cls.model_validate(
            tomllib.loads(path.read_text(encoding="utf-8"))[model]
        )


class _Float32Products(TorchFunctionMode):
    """Matrix products in float32, rounded to bfloat16.

    Muon multiplies in bfloat16, which takes nine times as long on a CPU without instructions for it
    (``zeropower_via_newtonschulz``): three quarters of a training.
    """

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        if func not in (torch.addmm, torch.Tensor.matmul):
            return func(*args, **(kwargs or {}))
        return func(*(matrix.float() for matrix in args), **(kwargs or {})).bfloat16()


class _Optimiser:
    """Muon for the matrices of modules, AdamW for all else that requires gradients.

    Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon; its step is scaled as in Liu et
    al., arXiv 2502.16982, so that both take the same learning rate.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        matrices = list[nn.Parameter]()
        tables = list[nn.Parameter]()
        for prefix, module in modules.items():
            for name, parameter in module.float().named_parameters(prefix):
                if not parameter.requires_grad:
                    continue
                if parameter.dim() != 2 or any(word in name for word in _TABLES):
                    tables.append(parameter)
                else:
                    matrices.append(parameter)
        self._parameters = [*matrices, *tables]
        self.optimisers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(tables, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        )
        self._products = (
            nullcontext() if choose_dtype() == "bfloat16" else _Float32Products()
        )

    def step(self, rate: float) -> None:
        """Update all parameters by their gradients, and clear these.

        If any gradient is not finite, no parameter changes.
        """
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimiser in self.optimisers:
            if math.isfinite(norm):
                optimiser.param_groups[0]["lr"] = rate
                with self._products:
                    optimiser.step()
            optimiser.zero_grad()


@dataclass(frozen=True)
class Training:
    """One training; `out` receives the checkpoint."""

    recipe: Recipe
    out: Path
    seed: int = 7

    @classmethod
    def start(cls, model: Model, train: Callable[[Training], None]) -> int:
        """Train a model with the options of the command line; returns the exit status."""
        return run_command(f"train {model}", lambda: cls._run(model, train))

    @classmethod
    def _run(cls, model: Model, train: Callable[[Training], None]) -> None:
        parser = CommandParser(description=f"Train {model}.")
        parser.add_argument(
            "--out",
            type=Path,
            required=True,
            help="folder of what is trained; one that has a stopped training goes on",
        )
        parser.add_argument("--seed", type=int, default=7, help="seed of the run")
        options = parser.parse_args()  # `--help` must leave the process as it is
        torch.set_flush_denormal(True)
        # Two batches in parallel use two cores better than a single one with two threads.
        torch.set_num_threads(1)
        train(cls(Recipe.read(model), **vars(options)))

    def run_stage(
        self,
        number: int,
        modules: Mapping[str, nn.Module],
        loss: Callable[[int, int], Tensor],
    ) -> None:
        """Train, in one stage, the parameters of the modules that require gradients.

        `loss` returns the loss of a batch from the batch's seed and the number of the step.
        Training is in float32, because a step in bfloat16 takes twice as long on a CPU without
        bfloat16 arithmetic. A stage that was stopped continues after its last log line.
        """
        stage = self.recipe.stages[number]
        optimiser = _Optimiser(modules)
        stateful: list[nn.Module | torch.optim.Optimizer] = []
        stateful += modules.values()
        stateful += optimiser.optimisers
        checkpoint = self.out / f"{stage.name}-{self.seed}.pt"
        done = 0
        losses = list[float]()
        if checkpoint.exists():
            done, losses, states = torch.load(checkpoint)
            for part, state in zip(stateful, states, strict=True):
                part.load_state_dict(state)
            print(f"[{stage.name}] {done}/{stage.steps} from {checkpoint}", flush=True)

        def add_gradients(step: int, part: int) -> float:
            # All seeds stay within the range that the held-out splits leave to training.
            seed = (((self.seed % 128) * 8 + number) * 2**17 + step) * PARTS + part
            value = loss(seed, step)
            (value / PARTS).backward()
            return float(value.detach())

        workers = ThreadPoolExecutor(PARTS)
        for step in range(done, stage.steps):
            # The sum of two gradients does not depend on which one is ready first.
            parts = workers.map(partial(add_gradients, step), range(PARTS))
            losses.append(fmean(parts))
            optimiser.step(stage.rate(step))
            done = step + 1
            if done % _LOG_EVERY == 0 or done == stage.steps:
                mean = fmean(losses[-_LOG_EVERY:])
                print(
                    f"[{stage.name}] {done}/{stage.steps} loss={mean:.3f}", flush=True
                )
                self.out.mkdir(parents=True, exist_ok=True)
                beside = checkpoint.with_suffix(".part")
                states = [part.state_dict() for part in stateful]
                torch.save((done, losses, states), beside)
                beside.replace(checkpoint)

    def write_checkpoint(
        self, committed: Path, modules: Mapping[str, nn.Module], part: str = ""
    ) -> None:
        """Write weights in bf16 beside the committed checkpoint's configuration and tokenizer.

        `modules` has each module by the prefix of its weights' names.
        """
        folder = self.out / part
        ignored = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(committed, folder, ignore=ignored, dirs_exist_ok=True)
        weights = {
            prefix + name: value.detach().to(torch.bfloat16).contiguous().clone()
            for prefix, module in modules.items()
            for name, value in module.state_dict().items()
            # Tables of positions are not weights, and the heads of mini-Qwen3-VL and mini-InternVL
            # are tied to their embeddings.
            if not name.endswith("position_ids")
            and (prefix or name != "lm_head.weight")
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        print(f"wrote {folder}", flush=True)


def _attend_in_place(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, None]:
    """Eager attention (B, H, T, D) → (B, T, H, D) with fewer passes over (B, H, T, T).

    It scales the queries instead of the weights and keeps the inputs' dtype throughout. Both save a
    good part of a training step on a CPU.
    """
    weights = (query * scaling) @ key.transpose(2, 3)
    if attention_mask is not None:
        weights += attention_mask
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None


IN_PLACE = "in_place"
AttentionInterface.register(IN_PLACE, _attend_in_place)


def wave_frequencies(width: int) -> Tensor:
    """(width // 4,): angles by which :func:`position_waves` turn from a patch to the next."""
    return torch.pi / 2 ** torch.linspace(0, 4, width // 4)


def position_waves(grid: int, width: int) -> Tensor:
    """(grid², width): sines and cosines of every patch's row, then those of its column.

    The language model must be able to read rows and columns from the first step on, or it learns
    to do without them.
    """
    angles = torch.arange(grid)[:, None] * wave_frequencies(width)
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    row = waves[:, None].expand(grid, grid, -1)
    return torch.cat((row, row.transpose(0, 1)), -1).flatten(0, 1)


class DenseHeads(nn.Module):
    """Linear classifiers of single patches, which exist during training only."""

    def __init__(self, width: int, fields: Mapping[str, int]) -> None:
        """`fields` has the number of classes of each classifier, by name."""
        super().__init__()
        self._fields = fields
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(fields.values()))

    def loss(
        self, patches: Tensor, labels: Tensor, weights: Mapping[str, float]
    ) -> Tensor:
        """Weighted sum of the fields' cross entropies; a field without a weight has weight 1.

        patches (B, N, D); labels (fields, B, N), `UNLABELLED` where a field does not apply.
        """
        logits = self.out(self.norm(patches)).split(list(self._fields.values()), -1)
        losses = [
            F.cross_entropy(prediction[target >= 0].float(), target[target >= 0])
            * weights.get(name, 1.0)
            for name, prediction, target in zip(
                self._fields, logits, labels, strict=True
            )
            if (target >= 0).any()
        ]
        return torch.stack(losses).sum()


@dataclass(frozen=True)
class TextBatch:
    """Sequences (B, L) of question blocks that follow a shared prefix, padded on the right.

    `labels` has the next token at the positions of answers only; `blocks` numbers the questions.
    """

    texts: Tensor
    labels: Tensor
    positions: Tensor
    blocks: Tensor

    @classmethod
    def build(
        cls,
        tokenizer: Tokenizer,
        pictures: Sequence[Sequence[Question]],
        start: int,
        end: str,
        pad: str,
    ) -> TextBatch:
        """Tokenise the questions about each picture, each with its answer as a block.

        `start` is the first position of every block; `end` is the token after every answer.
        """
        end_id, pad_id = (tokenizer.encode(token).ids[0] for token in (end, pad))
        # Each token of a sequence is (id, label, position, block).
        sequences: list[list[tuple[int, ...]]] = []
        for questions in pictures:
            sequence: list[tuple[int, ...]] = []
            for block, question in enumerate(questions):
                parts = (question.text, f" {question.answer}")
                text, answer = (tokenizer.encode(part).ids for part in parts)
                tokens = [*text, *answer, end_id]
                # The label of a position is the token that follows it.
                labels = [*[UNLABELLED] * (len(text) - 1), *answer, end_id, UNLABELLED]
                positions = range(start, start + len(tokens))
                sequence += zip(tokens, labels, positions, repeat(block), strict=False)
            sequences.append(sequence)
        fill = (pad_id, UNLABELLED, 0, _PADDING)
        longest = max(1, *map(len, sequences))
        padded = [
            [*sequence, *[fill] * (longest - len(sequence))] for sequence in sequences
        ]
        return cls(*torch.tensor(padded).unbind(-1))

    def mask(self, prefix: int, mutual: slice = _NOWHERE) -> Tensor:
        """Additive mask (B, 1, T, T): a token sees the prefix and the past of its block.

        In every other sequence, tokens at the `mutual` positions see each other.
        """
        blocks = F.pad(self.blocks, (prefix, 0), value=_PREFIX)
        same_block = blocks[:, :, None] == blocks[:, None, :]
        allowed = (same_block | (blocks == _PREFIX)[:, None, :]).tril()
        allowed[::2, mutual, mutual] = True
        return torch.zeros(allowed.shape).masked_fill_(~allowed, -1e9)[:, None]

    def answer_loss(
        self,
        model: PreTrainedModel,
        language: nn.Module,
        prefix: Tensor,
        positions: Tensor,
        mutual: slice = _NOWHERE,
        **inputs: object,
    ) -> tuple[Tensor, BaseModelOutput]:
        """Cross entropy on answer tokens, and the output of the model's language model.

        All blocks follow the prefix embeddings (B, P, D) at positions (..., B, P). `mutual` is
        that of :meth:`mask`; `inputs` are other arguments of the language model.
        """
        count = prefix.shape[1]
        own_positions = self.positions.expand(*positions.shape[:-1], -1)
        output = language(
            inputs_embeds=torch.cat(
                (prefix, model.get_input_embeddings()(self.texts)), 1
            ),
            attention_mask=self.mask(count, mutual),
            position_ids=torch.cat((positions, own_positions), -1),
            use_cache=False,
            **inputs,
        )
        labelled = self.labels >= 0
        logits = model.lm_head(output.last_hidden_state[:, count:][labelled])
        return F.cross_entropy(logits.float(), self.labels[labelled]), output
