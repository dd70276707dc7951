"""`notes serve`: serve one model, or another server's, over HTTP, with OpenAI's endpoints and skills."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from notes_cli import config, output
from notes_cli.commands.options import Number, choose_model, model_options, named, open_workspace
from notes_cli.commands.request import question_options
from notes_cli.commands.terminal import Command, flag_of, option
from notes_cli.errors import NotesError, reason
from notes_cli.text.names import human_size

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from notes_cli.runtime.workspace import Workspace
    from notes_cli.serve.prepare import Options
    from notes_cli.serve.scheduler import DecodeThread
    from notes_cli.serve.server import Served
    from notes_cli.serve.upstream import Target

# Parameters that are Options of the server, too.
SAME = ("host", "origins", "page", "splice", "errata", "reuse", "parallel", "max_tokens")
# Parameters that need no model of this server.
WITH_UPSTREAM = (
    *("host", "port", "max_body", "keys", "origins", "drain", "verbose", "splice", "errata"),
    *("upstream", "upstream_key", "texts"),
)
NEEDS = ("starlette", "uvicorn", "anyio", "prometheus_client", "httpx")
NEEDED = "Install what it needs: pip install starlette uvicorn prometheus-client httpx"


@click.command(cls=Command)
@option("--host NAME", "Where to listen.", default="127.0.0.1")
@option("--port", "Where to listen, 0: any that is free.", type=Number(0, 65535), default=8080)
@option("--parallel", "Answers at a time.", type=Number(1, 64), default=16)
@option("--max-tokens", "Tokens of an answer at most.  [default: until the context ends]", rare=True, type=Number(1))
@option(
    "--cache-ram",
    "MiB for prompts beyond the context, and for learned texts.  [default: 1/4 of what is free, at most 8192]",
    rare=True,
    type=Number(0),
)
@option(
    "--reuse",
    "Of a changed prompt: nothing (exact), compiled texts, also those that the server learns while idle.",
    rare=True,
    type=click.Choice(("exact", "compiled", "learned")),
    default="learned",
)
@option("--max-body", "MiB of a request at most.", rare=True, type=Number(1), default=16)
@option(
    "--api-key KEY",
    "A key that clients must send; better in NOTES_API_KEY, which others cannot see. Repeatable.",
    name="keys",
    multiple=True,
    envvar="NOTES_API_KEY",
)
@option("--cors-origin ORIGIN", "Sites whose pages may ask (CORS).", rare=True, name="origins", multiple=True)
@option("--page/--no-page", "A web page at /.  [default: --page]", rare=True, default=True, show_default=False)
@option("--no-forms", "Let no request restrict answers to a grammar or a JSON schema.", rare=True, is_flag=True)
@question_options(
    "splice",
    "errata",
    splice={"help": "A skill for each request that names none and no session: a compiled one, or a text. Repeatable."},
    errata={"help": "A correction for these requests, as in notes ask, where they have none. Repeatable."},
)
@option("--alias NAME", "What clients may call the model. Repeatable.", name="aliases", multiple=True)
@option(
    "--drain",
    "Seconds that running answers get when the server ends.",
    rare=True,
    type=Number(0, kind=float),
    default=30,
)
@option("--upstream URL", "Load no model, and pass requests on to another server of OpenAI's API, with skills as text.")
@option(
    "--upstream-key KEY",
    "The key of that server; better in NOTES_UPSTREAM_KEY, which others cannot see.",
    envvar="NOTES_UPSTREAM_KEY",
)
@option(
    "--skills PATH",
    "A text, a skill or a folder of them that requests to --upstream may name, besides compiled ones. Repeatable.",
    name="texts",
    multiple=True,
)
@model_options
def command(port: int, keys: tuple[str, ...], upstream: str | None, texts: tuple[str, ...], **given: Any) -> None:
    """Serve a model over HTTP: OpenAI's endpoints, with skills spliced in (docs/serving.md).

    After SIGTERM or Ctrl-C running answers are completed first; a second one ends them.

    \b
    Examples:
      notes serve
      notes serve -m notes-tiny -c 4096 --parallel 4
      notes serve --splice store-handbook --erratum "Carrier=Kestrel Freight"
      notes serve --api-key secret --host 0.0.0.0
      notes serve --upstream http://127.0.0.1:8000 --skills skills/
    """
    from notes_cli.library.safe_files import raise_file_limit
    from notes_cli.runtime.naming import own_name

    try:
        from notes_cli.serve.app import Service
        from notes_cli.serve.prepare import Options
        from notes_cli.serve.scheduler import DecodeThread
        from notes_cli.serve.server import listen, serve

        if upstream is not None:
            from notes_cli.serve.upstream import Target
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in NEEDS:
            raise NotesError(f"notes serve: {error.name} is not installed", NEEDED) from error
        raise
    if not all(key.strip() for key in keys):
        raise click.UsageError("--api-key (or NOTES_API_KEY) is empty")
    if named("keys") and os.environ.get("NOTES_API_KEY", "").strip():
        output.warn("--api-key is given, so NOTES_API_KEY is ignored")
    raise_file_limit()
    options = Options(
        **{name: given[name] for name in SAME},
        keys=tuple(key.strip() for key in keys),
        body=given["max_body"] << 20,
        forms=not given["no_forms"],
        verbose=bool(given["verbose"]),
        cache_ram=given["cache_ram"] and given["cache_ram"] << 20,
    )
    scheduler = None
    if upstream is not None:
        try:
            target = Target.parse(upstream, (given["upstream_key"] or "").strip())
        except NotesError as error:
            raise click.BadParameter(str(error), param_hint="'--upstream'") from None
        service: Served = _upstream(target, texts, options)
    else:
        if texts or named("upstream_key"):
            raise click.UsageError(f"{'--skills' if texts else '--upstream-key'} goes with --upstream URL")
        context = click.get_current_context()
        choice = choose_model(**given)

        def workspace() -> AbstractContextManager[Workspace]:
            with context.scope(cleanup=False):  # called in another thread
                return open_workspace(**given)

        word = given["model"] if given["model"] and not os.path.exists(given["model"]) else own_name(choice.path)
        names = (*given["aliases"], *([word] if word else []))
        scheduler = DecodeThread(workspace, replace(options, names=names, token=os.urandom(32).hex()))
        service = Service(scheduler)
    with listen(options.host, port) as listening, ExitStack() as ending:
        port = listening.getsockname()[1]

        def on_ready() -> None:
            if scheduler:
                ending.enter_context(_registered(scheduler, port, choice.settings))
            _say_serving(scheduler.names[0] if scheduler else target.url, options, port)
            store = scheduler.prefixes.store if scheduler else None
            if store and store.state_size:
                size, most = human_size(store.state_size), store.budget // store.state_size
                output.say(f"recurrent states of earlier prompts: {size} each, at most {most:,} are kept (--cache-ram)")

        serve(service, listening, on_ready, given["drain"])
    output.say("ended")
    if scheduler and scheduler.loading:  # llama.cpp is loading the model in another thread
        os._exit(0)


def _say_serving(name: str, options: Options, port: int) -> None:
    from notes_cli.serve.refusals import is_loopback

    host = f"[{options.host}]" if ":" in options.host else options.host
    output.say(f"serving {name} on http://{host}:{port}")
    if not options.keys and not is_loopback(options.host):
        output.warn("anyone who can reach this address can use it: no key is required (NOTES_API_KEY)")


def _upstream(target: Target, texts: Sequence[str], options: Options) -> Served:
    """Return the endpoints in front of another server. Raises UsageError for an option that needs a model."""
    from notes_cli.library.store import Library
    from notes_cli.serve.skill_texts import Placer, SkillTexts
    from notes_cli.serve.upstream import Upstream

    for parameter in click.get_current_context().command.params:
        if parameter.name and parameter.name not in WITH_UPSTREAM and named(parameter.name):
            raise click.UsageError(f"{flag_of(parameter)} does not go with --upstream, which loads no model")
    skills = SkillTexts(Library(config.paths().library), texts, options.splice)
    return Upstream(target, Placer(skills, options.errata), options)


@contextmanager
def _registered(scheduler: DecodeThread, port: int, settings: dict[str, Any]) -> Iterator[None]:
    """Register this server for the same user's `notes ask` in the block, if possible."""
    from notes_cli.commands.ask_server import folders
    from notes_cli.engine.header import stamp
    from notes_cli.serve.client import Server, address, registered

    options, sources = scheduler.options, scheduler.workspace.model.sources
    url = address(options.host, port)
    with ExitStack() as stack:
        if url is not None and not any(source.changed for source in sources):
            files = [list(stamp(source.file)) for source in sources]
            try:
                server = Server(url, options.token, files, settings, folders(), os.getpid())
                stack.enter_context(registered(config.paths().servers, server))
            except (OSError, NotesError) as error:
                why = error.what if isinstance(error, NotesError) else reason(error)
                output.warn(f"notes ask will not find this server: {why}")
        yield
