"""Safety check of a candidate, and fingerprint of its selections."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from offline_search.candidates.selection_program import SelectionProgram
from offline_search.dataset import Dataset
from offline_search.ledger.records import VerdictRecord
from offline_search.programs.selection import select_with_program
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, ProblemsError, SelectionError
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

Probes = Sequence[VisualTokens]
"""Visual tokens of a few images, as the served model computes them."""

PROBE_IMAGES = 16
"""Images of the probe set, each with one question."""


def check_candidate(state: PruningState, settings: Settings, probes: Probes) -> VerdictRecord:
    """Verdict on a state at every budget of the search; problems are recorded, not raised."""
    problems: list[str] = []
    for budget in settings.budgets:
        try:
            policy = materialize(state, budget)
        except AutopruneError as error:
            problems += _messages(error)
            continue
        failed = [verdict for verdict in safety_check(policy).verdicts if not verdict.ok]
        problems += [f"{verdict.name} at K = {budget}: {verdict.detail}" for verdict in failed]
    if problems:
        return VerdictRecord(digest=state.digest, valid=False, problems=tuple(problems))
    policy = materialize(state, settings.source_budget)
    return VerdictRecord(
        digest=state.digest,
        valid=True,
        quota=policy.quota,
        r_min=policy.r_min,
        behaviour=selection_fingerprint(state, settings.budgets, probes),
    )


async def check_program(
    program: SelectionProgram, settings: Settings, probes: Probes
) -> VerdictRecord:
    """Verdict on a program that selects tokens: it runs on every probe, twice with equal results.

    Its fingerprint is that of a state that keeps the same tokens and merges none.
    """
    digest = hashlib.sha256()
    try:
        for budget in settings.budgets:
            for tokens in probes:
                first, second = [
                    await select_with_program(program, tokens, settings.base_policy, budget)
                    for _ in range(2)
                ]
                if not torch.equal(first, second):
                    raise SelectionError("select returns other indices when it is run again")
                _update_fingerprint(digest, first, gather_rows(tokens.features, first))
    except SelectionError as error:
        return VerdictRecord(digest=program.digest, valid=False, problems=(str(error)[:300],))
    behaviour = digest.hexdigest() if probes else ""
    return VerdictRecord(digest=program.digest, valid=True, behaviour=behaviour)


@torch.no_grad()
def selection_fingerprint(state: PruningState, budgets: Sequence[int], probes: Probes) -> str:
    """SHA-256 of the token rows selected for every probe; empty without probes.

    Includes features as well as indices, because two states may keep the same tokens and merge the
    discarded ones differently.
    """
    if not probes:
        return ""
    digest = hashlib.sha256()
    for budget in budgets:
        policy = materialize(state, budget)
        for tokens in probes:
            refined = refine(policy.at(tokens.count, tokens.grid.tiles), tokens)
            _update_fingerprint(digest, refined.indices, refined.features)
    return digest.hexdigest()


def _update_fingerprint(digest: hashlib._Hash, indices: Tensor, features: Tensor) -> None:
    digest.update(indices.contiguous().numpy().tobytes())
    digest.update(features.float().contiguous().numpy().tobytes())


def _messages(error: AutopruneError) -> list[str]:
    if isinstance(error, ProblemsError):
        return [str(problem) for problem in error.problems]
    return [str(error)]


def probes_from_checkpoint(
    checkpoint: Path, text_tower: Path | None, dataset: Dataset
) -> Sequence[VisualTokens]:
    """Probes from a local checkpoint: the first search images, each with its first question.

    Raises :class:`ConfigError` or :class:`UnsupportedModelError`.
    """
    # Imported here, because it loads transformers.
    from PIL import Image

    from vllm_autoprune.checkpoints.llava import open_vision

    vision = open_vision(checkpoint, text_tower)
    by_image = {example.image: example for example in reversed(dataset.examples("search"))}
    probes = []
    for example in islice(reversed(by_image.values()), PROBE_IMAGES):
        with Image.open(dataset.folder / example.image) as image:
            probes.append(vision.encode(image, example.question))
    return probes
