"""Every error a user can cause, in one tree; each maps to one HTTP answer and one CLI line.

StairsError
├── InvalidRequestError       400  a request's field is wrong (``param`` names it)
│   └── ContextLengthError    400  prompt (+ max_tokens) exceeds the context or the pool
├── ConfigError               400  an engine option or a model config that cannot be honoured
├── ModelNotFoundError        404  no such alias, file, folder or hub id
├── CheckpointError           422  a model file that is broken, hostile or of an unknown kind
├── OverloadedError           429  the queue is full, come back later
└── EngineDeadError           503  the engine stopped; the message says why

``assert`` is kept for our own bugs: it never answers for what a user typed.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "StairsError",
]


class StairsError(Exception):
    """Base of the tree. ``param`` names the field at fault, None where no single one is."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(StairsError, ValueError):
    status = 400
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class ConfigError(StairsError, ValueError):
    status = 400
    code = "invalid_config"


class ModelNotFoundError(StairsError, LookupError):
    status = 404
    code = "model_not_found"


class CheckpointError(StairsError):
    status = 422
    code = "invalid_checkpoint"


class OverloadedError(StairsError):
    status = 429
    code = "overloaded"


class EngineDeadError(StairsError):
    status = 503
    code = "engine_dead"
