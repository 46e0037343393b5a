"""``stairs serve``, the command: its flags are ServeOptions' fields, None where not given."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from stairs.server.options import ServeOptions, load_options

__all__ = ["serve"]


def serve(**flags: Any) -> None:
    """Serve MODEL: OpenAI's API under /v1, a chat page at /, /metrics, /health, /docs.

    Every flag is also an environment variable (--max-queue: STAIRS_MAX_QUEUE) and a key of the
    TOML file that --config names; a flag beats the environment, the environment beats the file.
    """
    file = flags.pop("config") or os.environ.get("STAIRS_CONFIG")
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in flags.items()
        if value not in (None, [])
    }
    options = load_options(given, os.environ, file=Path(file) if file else None)
    from stairs.server.run import serve as run

    run(options)


def _signature() -> inspect.Signature:
    """What Typer reads: ``model`` is the argument, everything else an option."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    config = Annotated[Path | None, typer.Option(help="A TOML file of these options.")]
    parameters = [inspect.Parameter("config", keyword, default=None, annotation=config)]
    for name, hint in get_type_hints(ServeOptions, include_extras=True).items():
        kind, help = get_args(hint)
        default = ServeOptions.__dataclass_fields__[name].default
        if default not in (None, ()) and name != "model":
            help = f"{help} [default: {default}]"
        info = typer.Argument if name == "model" else typer.Option
        kind = list[str] if get_origin(kind) is tuple else kind
        annotation = Annotated[kind | None, info(help=help, show_default=False)]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    return inspect.Signature(parameters)


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {p.name: p.annotation for p in serve.__signature__.parameters.values()}  # type: ignore[attr-defined]
