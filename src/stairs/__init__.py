"""Stairs: serving decoder language models with exact attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stairs.attention.flash import flash_attention, flash_attention_varlen
    from stairs.config import SamplingParams
    from stairs.llm import LLM
    from stairs.outputs import RequestOutput

__version__ = "0.1.0"

# Names resolve on first use, so that `import stairs` (and `stairs plan`) never loads torch.
_HOME = {
    "LLM": "stairs.llm",
    "RequestOutput": "stairs.outputs",
    "SamplingParams": "stairs.config",
    "flash_attention": "stairs.attention.flash",
    "flash_attention_varlen": "stairs.attention.flash",
}

__all__ = [
    "LLM",
    "RequestOutput",
    "SamplingParams",
    "flash_attention",
    "flash_attention_varlen",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stairs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
