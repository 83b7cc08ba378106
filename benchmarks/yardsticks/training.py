"""What both trainings share: processes, the loop of a stage, the optimiser, texts and their loss.

Two processes of one thread each train on batches of their own. A batch depends on seed, stage, step
and rank only, so one seed gives bit-identical weights, in one pass or resumed.
"""

from __future__ import annotations

import datetime
import math
import os
import random
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from benchmarks.yardsticks.examples import SEEDS
from benchmarks.yardsticks.questions import HALF, NEIGHBOUR, Model, Question, Questions
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.record_file import FrozenModel

RANKS = 2
_LOG_EVERY = 50
# The ranks inherit these. By default glibc returns every large tensor to the kernel and has its
# pages zeroed again for the next one, which costs a quarter of a step.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
_MOMENTUM, _DECAY = 0.95, 0.01
# Newton-Schulz coefficients of the Muon post, which drive singular values to about one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
# Matrices that AdamW updates: orthogonal steps do not help embeddings and classifier heads.
_TABLES = ("embed", "lm_head", "heads")

UNLABELLED = -1
# Values of `blocks` for the shared prefix, and for padding.
_PREFIX, _PADDING = -1, -2

LossOfBatch = Callable[[int, int], Tensor]
"""Loss of a batch, by its seed and the number of the step."""


class Stage(FrozenModel):
    """One stage of a recipe; `recipes.toml` says what the fields mean."""

    name: str
    steps: int
    images: int
    peak: float
    warmup: int
    fall: float
    views: tuple[float, ...] = ()


class _Recipe(FrozenModel):
    """Stages, and relative frequencies of kinds by what a picture shows."""

    stages: tuple[Stage, ...]
    questions: Mapping[str, Mapping[str, int]]
    phrases: Mapping[str, Mapping[str, int]]


def read_recipe(model: Model) -> _Recipe:
    """The recipe of a model."""
    path = Path(__file__).with_name("recipes.toml")
    return _Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))[model])


@dataclass(frozen=True)
class Run:
    """One training: `out` receives the checkpoint, `work` the weights after each stage."""

    out: Path
    work: Path
    stages: tuple[Stage, ...]
    seed: int = 7
    resume: bool = False
    steps_scale: float = 1.0


def start(description: str, stages: tuple[Stage, ...], train_stages: Callable[[Run], None]) -> None:
    """Parse the arguments, start all ranks, and wait for them."""
    parser = CommandParser(description=description)
    parser.add_argument("--seed", type=int, default=7, help="seed of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is trained")
    parser.add_argument("--work", type=Path, required=True, help="folder for the snapshots")
    parser.add_argument("--resume", action="store_true", help="continue after the last full stage")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="0.01 is a smoke test")
    run = Run(stages=stages, **vars(parser.parse_args()))
    run.work.mkdir(parents=True, exist_ok=True)
    (run.work / "meet").unlink(missing_ok=True)
    os.environ.update(_ENVIRONMENT)
    mp.spawn(train_rank, args=(run, train_stages), nprocs=RANKS)


def train_rank(rank: int, run: Run, train_stages: Callable[[Run], None]) -> None:
    """Train as one of the ranks, which meet at a file of the run's folder."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    meeting = run.work.resolve() / "meet"  # a file URL has no relative form
    # A rank that was paused must find the other one still waiting for it.
    patience = datetime.timedelta(hours=1)
    dist.init_process_group(
        "gloo", f"file://{meeting}", rank=rank, world_size=RANKS, timeout=patience
    )
    torch.manual_seed(run.seed)
    train_stages(run)
    dist.destroy_process_group()


def run_stage(run: Run, number: int, modules: Mapping[str, nn.Module], loss: LossOfBatch) -> None:
    """Train the modules in one stage; with `resume`, load them if it is finished already.

    The rate warms up, stays, and falls to 2 % at the end: after the kinds of question that are
    learnt late have begun to improve.
    """
    stage, rank = run.stages[number], dist.get_rank()
    steps = max(1, round(stage.steps * run.steps_scale))
    warmup = min(stage.warmup, max(1, steps // 10))
    optimiser = FlatMuon(modules, stage.peak)
    snapshot, started = run.work / f"{stage.name}.pt", time.monotonic()
    if run.resume and snapshot.exists():
        for name, weights in torch.load(snapshot, weights_only=True).items():
            modules[name].load_state_dict(weights)
        _log(f"[{stage.name}] is finished already")
        return
    _log(f"[{stage.name}] {steps} steps, peak learning rate {stage.peak:g}")
    recent: list[tuple[float, float]] = []
    for step in range(steps):
        value = loss(batch_seed(run.seed, number, step, rank), step)
        value.backward()
        progress = step / max(1, steps)
        share = 1.0 if progress < 1 - stage.fall else 0.02 + 0.98 * (1 - progress) / stage.fall
        norm = optimiser.step((step + 1) / warmup if step < warmup else share)
        recent.append((float(value.detach()), norm))
        done, seconds = step + 1, time.monotonic() - started
        if done % _LOG_EVERY == 0 or done == steps:
            mean_loss, mean_norm = (sum(part) / len(recent) for part in zip(*recent, strict=True))
            eta = seconds / done * (steps - done)
            _log(
                f"[{stage.name}] {done}/{steps} loss={mean_loss:.3f} norm={mean_norm:.3f} "
                f"{seconds:.0f}s ETA {eta:.0f}s"
            )
            recent = []
    if rank == 0:
        # Replaced in one step, so that it is never seen half written.
        weights = {name: module.state_dict() for name, module in modules.items()}
        torch.save(weights, snapshot.with_suffix(".tmp"))
        snapshot.with_suffix(".tmp").replace(snapshot)
    dist.barrier()


def _log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def batch_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """The seed of one training batch; it always lies in the training range."""
    number = (((seed % 128) * 8 + stage) * 2**17 + step) * 2 + rank
    assert number in SEEDS["train"]
    return number


def write_checkpoint(folder: Path, committed: Path, modules: Mapping[str, nn.Module]) -> None:
    """Write weights in bf16 beside the committed checkpoint's configuration and tokenizer.

    Modules are by the prefix of their weights' names. Only the first rank writes.
    """
    if dist.get_rank() != 0:
        return
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(committed, folder, ignore=ignored, dirs_exist_ok=True)
    weights = {
        prefix + name: value.detach().to(torch.bfloat16).contiguous().clone()
        for prefix, module in modules.items()
        for name, value in module.state_dict().items()
        # A table of positions is no weight, and mini-Qwen3-VL's head is tied to the embeddings.
        if not name.endswith("position_ids") and (prefix or name != "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _log(f"wrote {folder}")


class FlatMuon:
    """Muon for matrices and AdamW for the rest, over all parameters as views of one bf16 buffer.

    In a small model, one flat update and one flat all-reduce cost less than hundreds of small ones.
    Every rank computes the Muon steps of its share of the matrices. Muon: Jordan et al. 2024,
    kellerjordan.github.io/posts/muon; its step is scaled as in Liu et al., arXiv 2502.16982, so
    that both take the same learning rate.
    """

    def __init__(self, modules: Mapping[str, nn.Module], peak: float) -> None:
        tables: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters(prefix):
                if parameter.requires_grad:
                    table = parameter.dim() != 2 or any(word in name for word in _TABLES)
                    (tables if table else matrices).append(parameter)
        parameters = tables + matrices
        sizes = [parameter.numel() for parameter in parameters]
        self._peak, self._split = peak, sum(sizes[: len(tables)])
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._master = torch.cat([p.detach().float().flatten() for p in parameters])
        self._weights = self._master.to(torch.bfloat16)
        self._gradients = torch.zeros_like(self._weights)
        views = zip(self._weights.split(sizes), self._gradients.split(sizes), strict=True)
        for parameter, (weight, gradient) in zip(parameters, views, strict=True):
            parameter.data = weight.view(parameter.shape)
            parameter.grad = gradient.view(parameter.shape)
        self._momentum = torch.zeros_like(self._master[self._split :])
        # Offsets of the matrices of each shape, whose steps are computed together.
        self._starts: dict[tuple[int, int], list[int]] = {}
        offset = 0
        for matrix in matrices:
            self._starts.setdefault((matrix.shape[0], matrix.shape[1]), []).append(offset)
            offset += matrix.numel()
        # A parameter over the front of the master copy: AdamW steps it in place.
        self._tables = nn.Parameter(self._master[: self._split])
        self._adam = torch.optim.AdamW(
            [self._tables], lr=peak, betas=(0.9, 0.98), weight_decay=_DECAY, fused=True
        )

    def step(self, share: float) -> float:
        """Average the gradients over ranks, clip to norm 1 and update; returns the norm.

        `share` is of the peak learning rate. A gradient that is not finite changes nothing.
        """
        gradient = self._gradients.float()
        if self._ranks > 1:
            dist.all_reduce(gradient)
            gradient /= self._ranks
        norm = float(gradient.norm())
        if math.isfinite(norm):
            if norm > 1.0:
                gradient /= norm
            rate = self._peak * share
            self._tables.grad = gradient[: self._split]
            self._adam.param_groups[0]["lr"] = rate
            self._adam.step()
            self._step_matrices(gradient[self._split :], rate)
            self._weights.copy_(self._master)
        self._gradients.zero_()
        return norm

    def _step_matrices(self, gradient: Tensor, rate: float) -> None:
        self._momentum.mul_(_MOMENTUM).add_(gradient)
        direction = gradient.add(self._momentum, alpha=_MOMENTUM).to(torch.bfloat16)
        update = torch.zeros_like(direction)
        rank = dist.get_rank() if self._ranks > 1 else 0
        for shape, offsets in self._starts.items():
            size, starts = shape[0] * shape[1], offsets[rank :: self._ranks]
            if starts:
                rows = torch.stack([direction[start : start + size] for start in starts])
                steps = orthogonalise(rows.view(len(starts), *shape)).flatten(1)
                # Of about the size of AdamW's steps.
                steps = steps * (0.2 * math.sqrt(max(shape)))
                for start, row in zip(starts, steps, strict=True):
                    update[start : start + size] = row
        if self._ranks > 1:
            # On all ranks but one the addend is zero, so the sum is exact in bf16.
            dist.all_reduce(update)
        matrices = self._master[self._split :]
        matrices.mul_(1 - rate * _DECAY).add_(update.float(), alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The matrices with singular values of about one that are nearest to (M, m, n) bf16."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if tall else x


def attend_in_place(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, **unused: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Eager attention (B, H, T, D) → (B, T, H, D) with fewer passes over (B, H, T, T).

    It scales the queries instead of the weights and stays in the inputs' type throughout, which
    saves a good part of a training step on a CPU.
    """
    weights = (query * scaling) @ key.transpose(2, 3)
    if attention_mask is not None:
        weights += attention_mask
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("in_place", attend_in_place)


def position_waves(grid: int, width: int) -> Tensor:
    """(grid², width): sines and cosines of every patch's row and column.

    The language model must be able to read rows and columns from the first step on, or it learns
    to do without them.
    """
    frequencies = torch.pi / 2 ** torch.linspace(0, 4, width // 4)
    angles = torch.arange(grid)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    row = waves[:, None].expand(grid, grid, -1)
    return torch.cat((row, row.transpose(0, 1)), -1).flatten(0, 1)


class DenseHeads(nn.Module):
    """Linear classifiers of single patches, which exist during training only."""

    def __init__(self, width: int, fields: Mapping[str, int]) -> None:
        """`fields` has the number of classes of each classifier."""
        super().__init__()
        self._fields = fields
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(fields.values()))

    def loss(self, patches: Tensor, labels: Tensor, weights: Mapping[str, float]) -> Tensor:
        """Weighted sum of the fields' cross entropies.

        patches (B, N, D); labels (fields, B, N), `UNLABELLED` where a field does not apply.
        """
        logits = self.out(self.norm(patches)).split(list(self._fields.values()), -1)
        losses = []
        for name, prediction, target in zip(self._fields, logits, labels, strict=True):
            labelled = target >= 0
            if labelled.any():
                loss = F.cross_entropy(prediction[labelled].float(), target[labelled])
                losses.append(loss * weights.get(name, 1.0))
        return torch.stack(losses).sum()


Text = tuple[str, Question]
"""A question as it is asked, in its form of the prompt."""


def draw_texts(
    questions: Questions, weights: Mapping[str, int], number: int, form: str
) -> list[Text]:
    """Draw questions about a picture, or phrases; one question of each pair.

    A phrase asks the same as a question in a few words. A fifth of its tokens are answer, of a
    question's one in twenty, and finding what is named is what a small model takes longest to
    learn. `weights` are relative frequencies of kinds; `form` has a slot for the question.
    """
    texts: list[Text] = []
    while len(texts) < number:
        kind = questions.rng.choices(list(weights), list(weights.values()))[0]
        if group := questions.generate(kind):
            # A choice advances the generator, also of one question; these were drawn without.
            alone = kind in (NEIGHBOUR, HALF)
            question = group[0] if alone else questions.rng.choice(group)
            texts.append((form.format(question=question.text), question))
    return texts


def keep_shown_tokens(
    rng: random.Random, shown: Sequence[int], budget: int, count: int
) -> list[int]:
    """`budget` of `count` raster tokens, ascending: those that show something first."""
    order = dict.fromkeys((*shown, *rng.sample(range(count), count)))
    return sorted(list(order)[:budget])


@dataclass(frozen=True)
class TextBatch:
    """Sequences of question blocks (B, L) that follow a shared prefix; padded on the right.

    `labels` are the tokens that follow, at answers only; `blocks` numbers the questions.
    """

    texts: Tensor
    labels: Tensor
    positions: Tensor
    blocks: Tensor

    def mask(self, prefix: int) -> Tensor:
        """Additive bf16 mask (B, 1, T, T): a token sees the prefix and the past of its block."""
        blocks = F.pad(self.blocks, (prefix, 0), value=_PREFIX)
        length = blocks.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        same_block = blocks[:, :, None] == blocks[:, None, :]
        allowed = (same_block | (blocks == _PREFIX)[:, None, :]) & causal
        mask = torch.zeros(allowed.shape, dtype=torch.bfloat16)
        return mask.masked_fill_(~allowed, -1e9)[:, None]

    def loss(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """Cross entropy on answer tokens; `head` makes logits of the states (B, L, D)."""
        labelled = self.labels >= 0
        return F.cross_entropy(head(hidden[labelled]).float(), self.labels[labelled])


def build_texts(
    tokenizer: Tokenizer, pictures: Sequence[Sequence[Text]], start: int, end: str, pad: str
) -> TextBatch:
    """Tokenise the texts about each picture, with their answers, into one block each.

    `start` is the position of every block; `end` is the token behind every answer.
    """
    end_id, pad_id = (tokenizer.encode(token).ids[0] for token in (end, pad))
    # Of every token: id, label, position, block.
    sequences: list[list[tuple[int, ...]]] = []
    for pairs in pictures:
        texts = tokenizer.encode_batch([text for text, _ in pairs])
        answers = tokenizer.encode_batch([f" {question.answer}" for _, question in pairs])
        sequence: list[tuple[int, ...]] = []
        for block, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            tokens = [*text.ids, *answer.ids, end_id]
            # The label of a position is the token that follows it.
            labels = [*[UNLABELLED] * (len(text.ids) - 1), *answer.ids, end_id, UNLABELLED]
            positions = range(start, start + len(tokens))
            sequence += zip(tokens, labels, positions, repeat(block), strict=False)
        sequences.append(sequence)
    fill = (pad_id, UNLABELLED, 0, _PADDING)
    longest = max(1, *map(len, sequences))
    padded = [[*sequence, *[fill] * (longest - len(sequence))] for sequence in sequences]
    return TextBatch(*torch.tensor(padded).unbind(-1))
