"""Resolves a request once its skills are open: effective settings, constraint, global errata, and the prompt.

Settings are explicit, else the model's in config.yaml, else safe defaults. All requests use `resolve`: single
questions, batches, sessions, verification, and the server's notes API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from notes_cli.editing.methods import ERRATUM, FIELD_ERRATUM, RECOMPUTE, SUFFIX, Change, Method, refusal, with_quoted
from notes_cli.engine.segment import Segment
from notes_cli.errors import (
    GrammarError,
    Help,
    NotesError,
    Notice,
    Say,
    SessionError,
    SkillError,
)
from notes_cli.library.segment_files import ERRATA
from notes_cli.library.store import Library
from notes_cli.runtime.open_skills import open_segments
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt, changes_of
from notes_cli.runtime.request import Callbacks, Request, Settings
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import (
    Fielded,
    Known,
    as_new_values,
    describe_wildcards,
    known_fields,
    read_errata,
    shipped_wordings,
    wording_form,
)
from notes_cli.text.fields import any_quoted
from notes_cli.text.keys import listed
from notes_cli.text.messages import asking

if TYPE_CHECKING:
    from notes_cli.library.global_errata import GlobalErratum


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose skills are open and whose settings are effective; with the times of its start and of its skills
    being open (time.perf_counter)."""

    request: Request  # with global errata
    prompt: Prompt  # in a session that of the first turn; its segments: skills, then the memory, then images
    settings: Settings
    begun: float
    ready: float
    grammar: str | None = None  # constraint of the answer


def resolve_request(workspace: Workspace, request: Request, callbacks: Callbacks, *, dry: bool = False) -> Prepared:
    """Open the skills of a request outside sessions, and resolve it. `dry`: do not compile texts."""
    begun = time.perf_counter()
    if request.results:
        raise SessionError("results of tools go with a session, whose last answer has called them")
    request = _with_tools(request) if request.tools else request
    grammar = constraint_of(workspace, request)
    segments = open_requested(workspace, request, callbacks, dry=dry)
    return resolve(workspace, request, segments, callbacks, grammar=grammar, begun=begun)


def resolve(
    workspace: Workspace,
    request: Request,
    segments: Sequence[Segment],
    callbacks: Callbacks,
    *,
    had: Sequence[Fielded] | None = None,
    unapplied: Mapping[str, str] | None = None,
    goes_on: bool = False,
    grammar: str | None = None,
    begun: float | None = None,
) -> Prepared:
    """Resolve a request with these opened skills and images, with notices about the outcome. `had`: skills already in
    the session, None outside sessions; `goes_on`: the session only edits them. `unapplied`: global errata for those, by
    field, not stated yet. `begun`: start of the request; None: now."""
    _ = workspace.context  # creating it counts as opening
    ready, before = time.perf_counter(), had or ()
    segments = with_unique_names(segments, [skill.name for skill in before])
    if not goes_on and any_quoted((*request.errata, *request.fields)):
        errata, fields, segments = with_quoted(workspace.model, request.errata, request.fields, segments)
        request = replace(request, errata=errata, fields=fields)
    known = known_fields(*before, *segments)
    for_all = global_errata(workspace) if segments else ()
    if for_all or unapplied:
        request = _add_global_errata(request, segments, for_all, callbacks.on_event, known, unapplied or {})
    stated = False
    if request.errata or request.fields:
        for text in describe_wildcards([*request.errata, *request.fields], known):
            callbacks.on_event(Notice(text))
        if not goes_on:
            fields, errata = as_new_values(request.errata, request.fields, known)
            stated = len(errata) < len(request.errata)
            request = replace(request, fields=fields, errata=errata)
    settings, prompt = _settings(workspace, request, segments), Prompt(request.question, segments)
    if not goes_on:
        prompt = _prompt(request, segments, settings, known)
        method, why = _method(workspace, request, prompt, stated, callbacks.on_event)
        settings, prompt = replace(settings, method=method, why=why), replace(prompt, method=method or ERRATUM)
    return Prepared(request, prompt, settings, ready if begun is None else begun, ready, grammar)


def _prompt(request: Request, segments: Sequence[Segment], settings: Settings, known: Known) -> Prompt:
    """Raises SkillError for an erratum of an unknown field, and for a skill in `decode` that is not spliced."""
    others = len(request.images) + (request.memory is not None)
    return Prompt(
        request.question,
        segments,
        read_errata(request.errata, known),
        request.system,
        settings.wording,
        fields=request.fields,
        known=known,
        place=settings.place,
        shown=frozenset(segment.name for segment in segments[len(segments) - others :]),
        decoded=_names_to_decode(request, segments) if request.decode else frozenset(),
        think=settings.think,
        conversation=request.conversation,
        seam=settings.seam,
        splice=not request.recompute,
        strict=request.strict,
        exact=request.exact,
    )


def _with_tools(request: Request) -> Request:
    """Return the request with its tools in its conversation, and the grammar of a call if it must call one."""
    conversation = request.conversation or asking(request.question, system=request.system)
    request = replace(request, conversation=replace(conversation, tools=tuple(request.tools)))
    if request.tool_choice == "auto":
        return request
    from notes_cli.text.schema import calls_grammar
    from notes_cli.text.tools import parameters_of, strict_ones

    parameters = parameters_of(request.tools, "" if request.tool_choice == "required" else request.tool_choice)
    return replace(request, grammar=calls_grammar(parameters, strict_ones(request.tools)), must_call=True)


def constraint_of(workspace: Workspace, request: Request) -> str | None:
    """Return the grammar that constrains the answer; None without one. Raises GrammarError for an unusable one."""
    if request.json_schema is None and request.grammar is None:
        return None
    from notes_cli.guidance import Grammar
    from notes_cli.text.grammar import gbnf_grammar
    from notes_cli.text.schema import schema_grammar

    constraints = [request.json_schema is not None, request.grammar is not None, request.choices is not None]
    if sum(constraints) > 1:
        raise GrammarError("an answer can be held to one of: a JSON schema, a grammar, choices", "Leave the others out")
    if request.grammar is None:
        grammar = schema_grammar(request.json_schema)
    else:  # a server has read it already
        grammar = request.grammar if isinstance(request.grammar, Grammar) else gbnf_grammar(request.grammar)
    check_usable(workspace, grammar)
    return grammar


def check_usable(workspace: Workspace, grammar: str) -> None:
    """Raise GrammarError for a grammar that was read and cannot be used with the vocabulary of the model."""
    from notes_cli.engine.sampler import Constraint

    Constraint(workspace.model, grammar)


def open_requested(workspace: Workspace, request: Request, callbacks: Callbacks, *, dry: bool = False) -> list[Segment]:
    """Open the skills of a request, then its memory, then its images (open_skills.py)."""
    opened = partial(open_segments, workspace, say=callbacks.on_event, watch=callbacks.progress, dry=dry)
    memory = [] if request.memory is None else [request.memory]
    return [*opened(request.splice), *opened(memory), *opened(request.images, image=True)]


def with_unique_names(segments: Iterable[Segment], taken: Iterable[str] = ()) -> list[Segment]:
    """Rename images whose names are taken, as an image may be shown twice."""
    used = set(taken)
    named: list[Segment] = []
    for segment in segments:
        name, number = segment.name, 1
        while segment.is_image and name in used:
            number += 1
            name = f"{segment.name}-{number}"
        used.add(name)
        named.append(segment if name == segment.name else replace(segment, name=name))
    return named


def global_errata(workspace: Workspace) -> Sequence[GlobalErratum]:
    """Return the current global errata."""
    library = workspace.library
    if not isinstance(library, Library) or not (library.folder / ERRATA).exists():
        return ()
    from notes_cli.library.global_errata import GlobalErrata

    return GlobalErrata(library.folder).all()


def _add_global_errata(
    request: Request,
    segments: Sequence[Segment],
    errata: Sequence[GlobalErratum],
    say: Say,
    known: Known,
    unapplied: Mapping[str, str],
) -> Request:
    """Add the global errata of the request's skills, and `unapplied` ones of earlier skills, except for fields that the
    request itself corrects."""
    from notes_cli.library.global_errata import holding

    corrected = {reference.key for reference in read_errata(request.errata, known) if reference.field}
    corrected |= {reference.key for name in request.fields for reference in known.find(name)}
    global_values = dict(unapplied)
    for segment in segments:
        global_values |= {f"{segment.name}.{name}": value for name, value in holding(errata, segment).items()}
    added = []
    for name, value in global_values.items():
        key = known.find(name)[0].key
        if key not in corrected:
            added.append(f"{key}={value}")
            say(Notice(f"{key} is {value}: a correction for all sessions"))
    return replace(request, errata=(*added, *request.errata))


def _settings(workspace: Workspace, request: Request, segments: Sequence[Segment]) -> Settings:
    """Return the settings without a method."""
    if request.seam:
        _check_seam(request.seam, segments)
    if request.wording:
        wording_form(request.wording)  # raises for an unknown wording even where it is not used
    think = requests_reasoning(workspace, request.think, request.max_think)
    default = defaults(workspace)
    wording, place = request.wording or default.wording, request.place or default.place
    return Settings(think, wording, place, default.seam if request.seam is None else request.seam)


def requests_reasoning(workspace: Workspace, wanted: bool, most: int) -> bool:
    """True if to request reasoning of `most` tokens: a cue without any would mislead a model that needs one."""
    return wanted and (most > 0 or bool(workspace.reasoning.open))


def _check_seam(seam: int, segments: Sequence[Segment]) -> None:
    """Raise NotesError for a seam that covers a whole skill."""
    for segment in segments:
        if seam >= len(segment) and not segment.media:  # for an image the seam ends before its rows
            text = f"a seam of {seam} tokens leaves nothing of {segment.name} to splice, which has {len(segment)}"
            raise NotesError(text, Help.SHORTER_SEAM())


def _method(
    workspace: Workspace, request: Request, prompt: Prompt, stated: bool, say: Say
) -> tuple[Method | None, str | None]:
    """Return the explicit or best edit method and the reason; None without new values. `stated`: it must append an
    erratum."""
    if not request.fields:
        if request.method not in (None, ERRATUM) and request.errata:
            text = f"the edit method {request.method} has no effect: no erratum gives a field a value"
            say(Notice(text, warning=True))
        return None, None
    if request.method:
        if request.exact and request.method.in_place:
            text = f"{request.method} leaves rows that were computed with the old value, and exact rows were asked for"
            raise NotesError(text, Help.OTHER_METHOD(method=f"{SUFFIX} or {ERRATUM}"))
        return request.method, None
    if request.recompute and not stated:
        return RECOMPUTE, f"{RECOMPUTE}: nothing is spliced"
    method, why = method_for(workspace, prompt, stated=stated)
    if request.exact and method.in_place:
        return ERRATUM, f"{ERRATUM}: exact rows were asked for, and {method} leaves some of the old value"
    return method, why


def method_for(workspace: Workspace, prompt: Prompt, *, stated: bool = False) -> tuple[Method, str]:
    """Return the edit method for the prompt's values where none is given, and the reason. `stated`: it must append an
    erratum."""
    with_images = {segment.name for segment in prompt.segments if segment.media}
    corrected = {reference.skill for reference, _ in prompt.values}
    if corrected & with_images:
        if corrected <= with_images:
            return ERRATUM, f"{ERRATUM}: the skills that it corrects have images, and no rows of such skills are edited"
        stated = True
    changes = list(changes_of(workspace, prompt).values())
    return choose(workspace, changes, stated=stated)


def _names_to_decode(request: Request, segments: Sequence[Segment]) -> frozenset[str]:
    """Return the names of skills to decode. Raises SkillError for one that is not in `splice`."""
    names = {name.name: name.name for name in segments}
    words = zip(request.splice, segments, strict=False)
    names |= {os.fspath(word): segment.name for word, segment in words if not isinstance(word, Segment)}
    for name in request.decode:
        if name not in names:
            text = f"{name} is to be decoded, and is none of the skills to splice"
            raise SkillError(text, f"They are: {listed(sorted(set(names.values())))}")
    return frozenset(names[name] for name in request.decode)


# Settings where the request names none.

# Measured on tiny models (docs/findings.md).
RUN_SEAM = 16  # tokens recomputed at the start of a run (runtime/token_runs.py; docs/serving.md)
APART_SEAM = 48  # likewise, of a tool or a block that was computed without those before it
DEFAULT_PLACE = "early"
NEAR = 32  # with at most so many tokens after a change all are decoded, which is exact and costs as much as an erratum


def parse_method(name: Method | str | None) -> Method | None:
    """Return the method of that name; None for the default. Raises NotesError for an unknown name."""
    return Method.parse(name) if isinstance(name, str) else name


def defaults(workspace: Workspace) -> Settings:
    """Return the settings of the model in config.yaml, else safe ones, without a method. Raises NotesError for wrong
    values there."""
    saved = workspace.configured
    wording = saved.get("wording", shipped_wordings()["default"])
    wording_form(wording)  # raises for an unknown one, as the next line does for a method
    default_method(workspace)
    return Settings(False, wording, saved.get("place", DEFAULT_PLACE), int(saved.get("seam", DEFAULT_SEAM)))


def default_method(workspace: Workspace) -> tuple[Method, str]:
    """Return the method for new values where none is named, and the reason. Raises NotesError for an unknown one in
    config.yaml."""
    if "method" in workspace.configured:
        method = Method.parse(workspace.configured["method"])
        return method, f"{method}: the default of this model in config.yaml"
    return FIELD_ERRATUM, f"{FIELD_ERRATUM}: the default"


def choose(workspace: Workspace, changes: Sequence[Change], *, stated: bool = False) -> tuple[Method, str]:
    """Return a method that this model supports for these changes, and the reason. `stated`: an erratum was requested,
    so it must append one."""
    default = default_method(workspace)
    if stated and not default[0].appends_erratum:
        default = FIELD_ERRATUM, f"{FIELD_ERRATUM}: an erratum was asked for"
    method, why = default
    if not stated and changes and all(len(one.tokens) - one.patches[0].first <= NEAR for one in changes):
        method, why = SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
    reason = refusal(workspace.context, method, changes=changes)
    if reason is None:
        return method, why
    if default[0].edits_rows and refusal(workspace.context, default[0], changes=changes) is None:
        return default
    return ERRATUM, f"{ERRATUM}: {method} is not possible: {reason}"
