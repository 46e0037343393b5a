from __future__ import annotations

from collections.abc import Callable

import pytest

from stairs.checkpoints.planned import read_any_config
from stairs.config import ModelConfig
from stairs.planner.catalogue import CATALOGUE, SHORT_NAMES
from stairs.planner.options import PlanOptions
from stairs.planner.plan import Plan, make_plan


def config(name: str) -> ModelConfig:
    return read_any_config(CATALOGUE[SHORT_NAMES[name]])


@pytest.fixture
def model() -> Callable[[str], ModelConfig]:
    return config


@pytest.fixture
def plan_for() -> Callable[..., Plan]:
    """``plan_for(name, **options)``; an H200 unless another device is asked for."""

    def make(name: str, /, **options: object) -> Plan:
        asked = PlanOptions(**({"gpu": "h200"} | options))  # type: ignore[arg-type]
        return make_plan(config(name), asked, name=name, origin="built-in config")

    return make
