"""Decoding of the plans that reach a worker; a plan that is not allowed is replaced, never raised.

The worker has to survive whatever a client sends through vLLM's ``/inference/v1/generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.shared.plan import NO_KEY, Choice, ItemPlan
from vllm_autoprune.serving.shared.plan_rules import PlanRules
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter


class PlanReader:
    """Decoder of plans in the worker; no input makes it raise.

    A malformed plan becomes the server's own budget with the base policy alone; settings that a
    plan may not have are removed. Both are counted, and the first is logged.
    """

    def __init__(self, rules: PlanRules, reporter: FallbackReporter, device: torch.device) -> None:
        self._rules = rules
        self._reporter = reporter
        self._device = device

    def read(self, rows: Sequence[object] | Tensor) -> list[ItemPlan]:
        """The plan of every image."""
        return [self._read(row) for row in rows]

    def _read(self, row: object) -> ItemPlan:
        try:
            plan = ItemPlan.decode(row)
        except Exception as error:  # the client may have sent anything
            self._reporter.report_refused_plan(error, self._device)
            return ItemPlan(self._rules.served.budget, NO_KEY, keep="reference")
        try:
            self._rules.check_token_ids(plan)
            self._rules.check_choice(plan)
        except AutopruneError as error:
            self._reporter.report_refused_plan(error, self._device)
            unread = tuple(Choice(choice.budget) for choice in plan.earlier)
            plan = replace(plan, instruction=(), language=(), earlier=unread)
            plan = replace(plan, keep="state", state=b"")
        return self._replace_refused(plan)

    def _replace_refused(self, plan: ItemPlan) -> ItemPlan:
        """The plan, or a control plan if the state does not allow its budget.

        An image that keeps every token may have such a plan, because nothing is selected then.
        """
        for one in (plan, replace(plan, keep="reference")):
            try:
                self._rules.served.policy_for_plan(one)
            except AutopruneError:
                continue
            return one
        return replace(plan, keep="random", state=b"", part="whole", core=0, earlier=())
