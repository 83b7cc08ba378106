"""Strategies that evolve Python code, as their papers do: baselines of the state language.

A candidate is a program with ``select(features, signals, K)``, confined as programs that return
states are, and measured by the same evaluator on the tokens that it selects. Its parents, prompts
and populations are those of the strategies that evolve states.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from offline_search.candidates.proposal import Draft
from offline_search.candidates.selection_program import SelectionProgram
from offline_search.evaluation.history import Trial
from offline_search.proposers.code_prompt import (
    INITIAL_PROGRAM,
    describe_code_task,
    extract_program,
    program_crossover_prompt,
    program_prompt,
)
from offline_search.proposers.proposal_client import ProposalClient, ProposalRequest
from offline_search.strategies.language_model import EvoPrompting, draw_parents
from offline_search.strategies.openevolve import OpenEvolve
from offline_search.strategies.strategy import Round, parent_names


class OpenEvolveCode(OpenEvolve):
    """`openevolve-code`: OpenEvolve changes a program that selects tokens."""

    def _initial_program(self) -> Draft:
        selection = SelectionProgram(INITIAL_PROGRAM)
        return Draft("initial", None, program=selection.code, selection=selection)

    def _system_prompt(self) -> str:
        return f"{describe_code_task(self._settings)}\n\nYou improve such a program."

    def _request(
        self, client: ProposalClient, request: ProposalRequest, extract: Callable[[str], str]
    ) -> Awaitable[Draft]:
        return client.request_selection(request, extract)


class EvoPromptingCode(EvoPrompting):
    """`evoprompting-code`: the model crosses two programs, drawn by rank from the best trials."""

    def _initialize(
        self, current: Round, index: int, population: Sequence[Trial]
    ) -> Awaitable[Draft]:
        messages = program_prompt(self._settings, INITIAL_PROGRAM, index, current.count)
        request = ProposalRequest(current.number, index, messages, "llm")
        return current.client.request_selection(request, extract_program)

    def _cross(self, current: Round, index: int, population: Sequence[Trial]) -> Awaitable[Draft]:
        parents = draw_parents(population, current.rng)
        messages = program_crossover_prompt(self._settings, parents)
        names = parent_names(*parents)
        request = ProposalRequest(current.number, index, messages, "crossover", names)
        return current.client.request_selection(request, extract_program)
