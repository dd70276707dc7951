"""`notes doctor`: the first thing that a bug report should hold."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import click

from notes_cli import __version__, output
from notes_cli.commands.options import DEMONSTRATION, model_option, rpc_option
from notes_cli.commands.remedies import worded
from notes_cli.errors import NotesError

if TYPE_CHECKING:
    from notes_cli.engine.model import Model


@click.command()
@model_option
@rpc_option
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(model: str | None, rpc: tuple[str, ...], json_: bool) -> int:
    """Show versions, the native library, devices, CPU features, the model found, and where files are.

    Exits 1 if something that notes needs is missing.

    \b
    Examples:
      notes doctor
      notes doctor -m qwen3:0.6b
    """
    facts: dict[str, str] = {
        "notes": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
    }
    problems: list[str] = []
    for check in (_native, _model, _files, _private):
        try:
            facts.update(check(model, rpc))
        except NotesError as error:
            problems += {worded(error)} - {*problems}  # a server that is not there fails two of them
    if json_:
        output.as_json({"version": 1, **facts, "problems": problems})
    else:
        for name, value in facts.items():
            output.result(f"{name:<18} {value}")
        for problem in problems:
            output.result(f"{'PROBLEM':<18} {problem}")
    return 1 if problems else 0


def _native(_model: str | None, rpc: tuple[str, ...]) -> dict[str, str]:
    from notes_cli.engine import system

    versions = system.versions()
    return {
        "native library": str(system.library()),
        "native interface": f"{versions['interface']}, llama.cpp of llama-cpp-python {versions['built from']}",
        "llama-cpp-python": versions["built from"],
        "patches": versions["patches"],
        "devices": "; ".join(system.available(rpc)) or "none",
        "features": system.features(),
    }


def _model(given: str | None, rpc: tuple[str, ...]) -> dict[str, str]:
    from notes_cli import config
    from notes_cli.engine.context import Context
    from notes_cli.engine.model import Model
    from notes_cli.engine.options import ContextOptions
    from notes_cli.runtime.naming import default_model, model_file

    path = model_file(given) if given else default_model()
    if not given and path == config.shipped_model():
        output.say(DEMONSTRATION)
    with (
        Model(path, rpc=rpc) as model,
        Context(model, ContextOptions(n_ctx=min(256, model.n_ctx_train or 256))) as context,
    ):
        operations = ("splice", "rewrite", "append", "read", "restore", *(("carry",) if model.recurrent else ()))
        can = {operation: context.supports(operation) for operation in operations}
        return {
            "model": f"{path} ({model.name}, {model.architecture}, {model.quantization})",
            **_context(model),
            "model can": ", ".join(operation for operation, reason in can.items() if reason is None),
            **{f"no {operation}": reason for operation, reason in can.items() if reason is not None},
        }


def _context(model: Model) -> dict[str, str]:
    """How long a context may be, and what it takes."""
    from notes_cli.engine import limits
    from notes_cli.engine.options import ContextOptions
    from notes_cli.runtime.contexts import DEFAULT_CONTEXT

    trained, there = limits.trained(model, ContextOptions()), limits.available()
    sizes = sorted({min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT), trained or DEFAULT_CONTEXT})
    needs = [f"{size:,} tokens take {limits.memory(model, ContextOptions(n_ctx=size))}" for size in sizes]
    return {
        "trained for": f"{trained:,} tokens" if trained else "any number of tokens",
        "context": "; ".join(needs) + (f"; {limits.size(there)} are available" if there is not None else ""),
    }


def _private(_model: str | None, _rpc: tuple[str, ...]) -> dict[str, str]:
    """Whether nobody else can write where what we keep is."""
    from notes_cli import config
    from notes_cli.library import private

    paths = config.paths()
    for folder in (paths.library, paths.sessions, paths.profiles, paths.models):
        private.check(folder)
    return {}


def _files(_model: str | None, _rpc: tuple[str, ...]) -> dict[str, str]:
    from notes_cli import config

    paths = config.paths()
    settings = config.load_config()
    return {
        "library": str(paths.library),
        "sessions": str(paths.sessions),
        "config": f"{paths.config}" + ("" if settings else " (not there or empty; notes init writes one)"),
    }
