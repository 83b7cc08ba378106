"""`openevolve`: the package OpenEvolve evolves a program that returns the candidate.

OpenEvolve selects parents and inspirations (`ProgramDatabase`, MAP-Elites), writes the prompt
(`PromptSampler`) and extracts the program from a reply. Its controller is not used, because it runs
programs in worker processes without limits (0.4.0, `EvaluatorConfig`: "resource limits not
implemented") and keeps replies and scores outside the ledger. The database is rebuilt from the
history every round, so it needs no storage of its own.

The fitness of a program is exp(objective), the geometric mean of the ratio between pruned and
unpruned answer probability, because OpenEvolve needs positive fitness. Failed programs have 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import pprint
import random
from collections.abc import Iterator
from random import Random
from textwrap import indent
from typing import TYPE_CHECKING

from offline_search.candidates.components import compact_json
from offline_search.candidates.proposal import Draft
from offline_search.evaluation.history import History, Trial
from offline_search.proposers.prompt import Messages, describe_language
from offline_search.proposers.proposal_client import ProposalRequest
from offline_search.settings import Settings
from offline_search.strategies.start_states import minimal_state
from offline_search.strategies.strategy import Round
from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from openevolve.database import Program, ProgramDatabase

_TOP_PROGRAMS, _INSPIRATIONS = 3, 2
"""Programs shown beside the parent: few, because a prompt has to fit a small model."""


class OpenEvolve:
    """One minimal program in the first round; after it, rewrites of parents."""

    uses_proposer = True
    stops_early = False

    def __init__(self, settings: Settings) -> None:
        _require_openevolve()
        self._settings = settings

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent rewrites, whose parents come from one database of all earlier rounds."""
        if current.number == 1:
            state = minimal_state(self._settings)
            body = pprint.pformat(compact_json(state), width=90, sort_dicts=False)
            literal = indent(body, " " * 11).strip()
            program = f"def policy(budget):\n    return {literal}\n"
            return [Draft("initial", state, program=program)]
        with _seeded_global_random(current.rng):
            database = _build_database(current.history)
            prompts = [self._build_prompt(database, current.number) for _ in range(current.count)]
        requests = (
            ProposalRequest(current.number, index, messages, "openevolve", (parent,))
            for index, (messages, parent) in enumerate(prompts)
        )
        drafts = [current.client.request_program(request, _extract_code) for request in requests]
        return list(await asyncio.gather(*drafts))

    def _build_prompt(self, database: ProgramDatabase, number: int) -> tuple[Messages, str]:
        """The prompt for one rewrite, and the name of its parent."""
        from openevolve.config import PromptConfig
        from openevolve.prompt.sampler import PromptSampler

        parent, inspirations = database.sample_from_island(0, _INSPIRATIONS)
        top = [
            program.to_dict() for program in database.get_top_programs(_TOP_PROGRAMS, island_idx=0)
        ]
        config = PromptConfig(
            system_message=_system_prompt(self._settings),
            num_top_programs=_TOP_PROGRAMS,
            num_diverse_programs=0,
        )
        prompt = PromptSampler(config).build_prompt(
            current_program=parent.code,
            parent_program=parent.code,
            program_metrics=parent.metrics,
            previous_programs=top,
            top_programs=top,
            inspirations=[program.to_dict() for program in inspirations],
            evolution_round=number,
            diff_based_evolution=False,
            program_artifacts=parent.metadata.get("failure"),
            feature_dimensions=database.config.feature_dimensions,
        )
        messages: Messages = (
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": prompt["user"]},
        )
        return messages, str(parent.id)


def _build_database(history: History) -> ProgramDatabase:
    """All programs so far, in order."""
    from openevolve.config import DatabaseConfig
    from openevolve.database import ProgramDatabase

    # One island, because a search has too few evaluations for several. No seed, because it would
    # be the same in every round; the caller seeds the global generator.
    database = ProgramDatabase(DatabaseConfig(num_islands=1, random_seed=None))
    for number, trial in enumerate(history.trials):
        if trial.proposal.program:
            database.add(_as_program(trial, history), iteration=number)
    return database


class _StableHashString(str):
    """A string with the same hash in every process.

    OpenEvolve draws names from sets, in an order that depends on their hashes.
    """

    def __hash__(self) -> int:
        return int.from_bytes(hashlib.sha256(self.encode()).digest()[:7], "big")


def _as_program(trial: Trial, history: History) -> Program:
    """A trial in OpenEvolve's form, with a constant timestamp so that runs are repeatable."""
    from openevolve.database import Program

    objective = history.objective_of(trial.name)
    fitness = 0.0 if objective is None else math.exp(min(objective, 0.0)) + max(objective, 0.0)
    reason = trial.result.reason
    return Program(
        id=_StableHashString(trial.name),
        code=trial.proposal.program,
        parent_id=trial.proposal.parents[0] if trial.proposal.parents else None,
        timestamp=0.0,
        iteration_found=trial.proposal.round,
        metrics={"combined_score": round(fitness, 4)},
        metadata={"failure": {"failure": reason}} if reason else {},
    )


def _extract_code(reply: str) -> str:
    """The program in a reply, or the whole reply if OpenEvolve finds none."""
    from openevolve.utils.code_utils import parse_full_rewrite

    return parse_full_rewrite(reply) or ""


def _system_prompt(settings: Settings) -> str:
    return (
        f"{describe_language(settings)}\n\n"
        "You improve a Python program: a function policy(budget) that returns such an object as a "
        "dict. It may compute and import math and random; it has no files and no network."
    )


@contextlib.contextmanager
def _seeded_global_random(rng: Random) -> Iterator[None]:
    """Seed the global random generator, which OpenEvolve uses, and restore its state afterwards."""
    before = random.getstate()
    random.seed(rng.getrandbits(64))
    try:
        yield
    finally:
        random.setstate(before)


def _require_openevolve() -> None:
    try:
        import openevolve.database  # noqa: F401

        # It logs every replacement of a program by a better one.
        logging.getLogger("openevolve").setLevel(logging.ERROR)
    except ImportError:
        fix = 'pip install "vllm-autoprune[search,search-openevolve]"'
        raise ConfigError("search", [Problem("openevolve", "is not installed", fix)]) from None
