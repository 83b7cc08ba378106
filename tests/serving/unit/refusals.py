"""Problems reported for refused settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.unit.samples import vllm_config
from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.startup.config import resolve_settings


def refusal(settings: object, config: Any = None) -> tuple[Problem, ...]:
    """Every problem of refused settings; each must have a fix."""
    with pytest.raises(ConfigError) as caught:
        resolve_settings(settings, vllm_config() if config is None else config)
    problems = caught.value.problems
    assert problems
    assert all(problem.what and problem.fix for problem in problems)
    return problems


def places(settings: object, config: Any = None) -> list[str]:
    """Places of those problems."""
    return [problem.where for problem in refusal(settings, config)]
