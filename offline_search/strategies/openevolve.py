"""`openevolve-states`, `-code`: the package OpenEvolve evolves programs.

A program returns a state, or in `-code` selects tokens.

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
import hashlib
import logging
import math
import pprint
import random
from collections.abc import Sequence
from functools import partial
from textwrap import indent
from typing import TYPE_CHECKING

from offline_search.candidates import Draft, minimal_state
from offline_search.components import SelectionProgram, compact_json
from offline_search.history import History, Trial
from offline_search.prompt import INITIAL_PROGRAM, Messages, describe_task
from offline_search.proposer import ProposalRequest
from offline_search.settings import Settings
from offline_search.strategies.language_model import Round, Strategy
from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from openevolve.database import Program, ProgramDatabase

_TOP_PROGRAMS, _INSPIRATIONS = 3, 2
"""Programs shown beside the parent: few, because a prompt has to fit a small model."""


class OpenEvolve(Strategy):
    """A minimal program and changes of it in the first round; after it, changes of parents."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        try:
            import openevolve.database  # noqa: F401
        except ImportError:
            fix = 'from a checkout: pip install ".[search,search-openevolve]"'
            raise ConfigError("search", [Problem("openevolve", "is not installed", fix)]) from None
        # It logs every replacement of a program by a better one.
        logging.getLogger("openevolve").setLevel(logging.ERROR)

    async def propose(self, current: Round) -> list[Draft]:
        """Concurrent changes, whose parents come from one database of all earlier rounds."""
        settings, drafts = self._settings, []
        if current.number == 1 and settings.writes_code:
            selection = SelectionProgram(INITIAL_PROGRAM)
            drafts = [Draft("initial", None, program=selection.code, selection=selection)]
        elif current.number == 1:
            state = minimal_state(settings)
            components = compact_json(state, bool(settings.bases))
            literal = indent(pprint.pformat(components, width=90, sort_dicts=False), " " * 11)
            program = f"def policy(budget):\n    return {literal.strip()}\n"
            drafts = [Draft("initial", state, program=program)]
        # OpenEvolve uses the global random generator.
        before = random.getstate()
        random.seed(current.rng.getrandbits(64))
        try:
            database = _build_database(current.history, drafts)
            # The islands of candidates in turn, over all rounds.
            start, islands = (current.number - 1) * settings.per_round, len(database.islands)
            prompts = [
                self._build_prompt(database, current.number, (start + index) % islands)
                for index in range(len(drafts), current.count)
            ]
        finally:
            random.setstate(before)
        requests = (
            ProposalRequest(current.number, index, messages, "openevolve", (parent.id,))
            for index, (messages, parent) in enumerate(prompts, len(drafts))
        )
        changed = [
            current.client.request_program(request, partial(_apply_change, parent.code))
            for request, (_, parent) in zip(requests, prompts, strict=True)
        ]
        return [*drafts, *await asyncio.gather(*changed)]

    def _build_prompt(
        self, database: ProgramDatabase, number: int, island: int
    ) -> tuple[Messages, Program]:
        """The prompt for one change, and its parent."""
        from openevolve.config import PromptConfig
        from openevolve.prompt.sampler import PromptSampler

        system = f"{describe_task(self._settings)}\n\n"
        if self._settings.writes_code:
            system += "You improve such a program."
        else:
            system += (
                "You improve a Python program: a function policy(budget) that returns such an "
                "object as a dict. It may compute and import math and random; it has no files and "
                "no network."
            )
        parent, inspirations = database.sample_from_island(island, _INSPIRATIONS)
        best = database.get_top_programs(_TOP_PROGRAMS, island_idx=island)
        top = [program.to_dict() for program in best]
        config = PromptConfig(
            system_message=system, num_top_programs=_TOP_PROGRAMS, num_diverse_programs=0
        )
        prompt = PromptSampler(config).build_prompt(
            current_program=parent.code,
            parent_program=parent.code,
            program_metrics=parent.metrics,
            previous_programs=top,
            top_programs=top,
            inspirations=[program.to_dict() for program in inspirations],
            evolution_round=number,
            diff_based_evolution=True,
            program_artifacts=parent.metadata.get("failure"),
            feature_dimensions=database.config.feature_dimensions,
        )
        messages: Messages = (
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": prompt["user"]},
        )
        return messages, parent


def _build_database(history: History, drafts: Sequence[Draft]) -> ProgramDatabase:
    """All programs so far, in order, or those of the first round before they are measured.

    A child goes to the island that it was sampled for, as in OpenEvolve's controller.
    """
    from openevolve.config import DatabaseConfig
    from openevolve.database import Program, ProgramDatabase

    # No seed, because it would be the same in every round; the caller seeds the global generator.
    database = ProgramDatabase(DatabaseConfig(random_seed=None))
    for number, trial in enumerate(history.trials):
        if trial.proposal.program:
            island = number % len(database.islands)
            database.add(_as_program(trial, history), iteration=number, target_island=island)
            database.increment_island_generation(island)
            if database.should_migrate():
                database.migrate_programs()
    for draft in drafts:
        initial = Program(
            id=_StableHashString("1.0"), code=draft.program, timestamp=0.0,
            metrics={"combined_score": 0.0},
        )  # fmt: skip
        database.add(initial, iteration=0, target_island=0)
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


def _apply_change(parent: str, reply: str) -> str:
    """The parent with the changes of a reply; raises :class:`ValueError` if there are none.

    Replies that leave the parent as it is are refused, as OpenEvolve does.
    """
    from openevolve.config import Config
    from openevolve.utils.code_utils import apply_diff_blocks, extract_diffs

    blocks = extract_diffs(reply, Config().diff_pattern)
    if not blocks:
        raise ValueError("the reply has no SEARCH/REPLACE block")
    code, applied = apply_diff_blocks(parent, blocks)
    if not applied:
        raise ValueError(f"none of {len(blocks)} SEARCH blocks is part of the program")
    if code == parent:
        raise ValueError("the reply does not change the program")
    return str(code)
