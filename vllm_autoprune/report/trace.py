"""Trace of a policy on one image: reference selection, exchanges, and every signal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.atoms.reassembly import find_owners
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.atoms.source import apply_view
from vllm_autoprune.tpdsl.base_policy import FALLBACKS, RefinedTokens
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


@dataclass(frozen=True, slots=True)
class SignalTrace:
    """One signal over all N tokens, normalised to 0..1 as the fusion sees it."""

    atom: str
    weight: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one image; indices are raster indices into its N tokens.

    ``reference`` is in order of selection, ``kept`` ascending; ``left`` and ``entered`` are the
    exchanged tokens, ascending; ``extra`` counts merged rows of the base policy, which are not
    single tokens; ``core`` are the tokens of the core, ascending; ``quality`` is g, None if the
    state does not score; ``fallback`` is one of ``tpdsl.outcome.FALLBACKS``; ``owners`` has for
    every token the kept one that it is merged into most, or -1, and is empty where nothing is
    merged.
    """

    grid: Grid
    reference: tuple[int, ...]
    kept: tuple[int, ...]
    left: tuple[int, ...]
    entered: tuple[int, ...]
    extra: int
    signals: tuple[SignalTrace, ...]
    quality: tuple[float, ...] | None
    fallback: str
    core: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


@torch.no_grad()
def trace_images(
    policy: PruningPolicy, tokens: VisualTokens, refined: RefinedTokens
) -> tuple[Trace, ...]:
    """Trace each of the B images, of which ``refined`` is the result of ``policy``."""
    policy = policy.at(tokens.count, tokens.grid.tiles)
    calls = policy.state.scoring.signals if refined.quality is not None else ()
    view = apply_view(policy.state.source.tokens, policy.state.ranked(tokens)) if calls else tokens
    signals = [
        (call.atom, call.weight, min_max_normalise(run_signal(call, view, refined.reference)))
        for call in calls
        if call.weight > 0
    ]
    core = policy.core if policy.budget < tokens.count else 0
    # With a core, two policies merge, each into its own part.
    merges = policy.core == 0 and policy.budget < tokens.count
    owners = find_owners(policy.state.reassembly, tokens, refined.indices) if merges else None
    traces = []
    for image in range(tokens.batch):
        reference = _integers(refined.reference[image])
        kept = tuple(sorted(_integers(refined.indices[image])))
        traces.append(
            Trace(
                grid=tokens.grid,
                reference=reference,
                kept=kept,
                left=tuple(sorted(set(reference) - set(kept))),
                entered=tuple(sorted(set(kept) - set(reference))),
                extra=refined.extra,
                signals=tuple(SignalTrace(a, w, _floats(v[image])) for a, w, v in signals),
                quality=None if refined.quality is None else _floats(refined.quality[image]),
                fallback=FALLBACKS[int(refined.fallback[image])],
                core=_integers(refined.indices[image, :core]),
                owners=_owners(owners, refined, image),
            )
        )
    return tuple(traces)


def _owners(owners: Tensor | None, refined: RefinedTokens, image: int) -> tuple[int, ...]:
    """Owners of one image; a fallback merges nothing."""
    if owners is None or int(refined.fallback[image]) or bool((owners[image] < 0).all()):
        return ()
    return _integers(owners[image])


def _integers(row: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in row.tolist())


def _floats(row: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in row.tolist())
