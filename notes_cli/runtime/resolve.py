"""Settling: what holds for a request, once its skills are open, and the prompt that comes of it.

Questions alone, in a batch, in a session and in a verification are all settled by `settled`, and so is what a server is
asked in the words of `notes ask`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from notes_cli.editing.methods import ERRATUM, RECOMPUTE, SUFFIX, Method
from notes_cli.engine.segment import Segment
from notes_cli.errors import GrammarError, Help, NotesError, Notice, Say, SessionError, SkillError
from notes_cli.library.segment_files import ERRATA
from notes_cli.library.store import Library
from notes_cli.runtime.corrections import (
    Fielded,
    as_new_values,
    describe_wildcards,
    known_fields,
    parse_errata,
    resolve_values,
)
from notes_cli.runtime.open_skills import open_segments
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.settings import UNMEASURED, choose, composition_warning, defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum, parse_erratum, read_errata, shipped_wordings, word
from notes_cli.text.keys import listed

if TYPE_CHECKING:
    from notes_cli.library.standing import GlobalErratum
    from notes_cli.runtime.answering import Callbacks, Request
    from notes_cli.runtime.assemble import AssembleOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a request: what was named, else what was measured of the model, else what is safe."""

    think: bool
    wording: str
    place: str
    seam: int
    method: Method | None = None  # None where no new values come in
    why: str | None = None  # the method, if it was not named


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request whose prompt is to be assembled: what holds for it, when it was asked, and when its
    skills were there (time.perf_counter)."""

    request: Request  # with what everybody is told
    segments: Sequence[Segment]  # skills, then images
    settings: Settings
    begun: float
    ready: float
    grammar: str | None = None  # what the answer is held to

    @property
    def prompt(self) -> Prompt:
        """Its prompt, which in a session is that of the first turn. Raise SkillError for an erratum of a field that no
        skill has, and for a skill to be decoded that is not spliced."""
        request, segments = self.request, self.segments
        return Prompt(
            request.question,
            segments,
            parse_errata(request.errata, segments),
            request.system,
            self.settings.wording,
            fields=request.fields,
            method=self.settings.method or Method(),
            place=self.settings.place,
            shown=frozenset(one.name for one in segments[len(segments) - len(request.images) :]),
            decoded=_decoded(request, segments),
            think=self.settings.think,
        )

    @property
    def how(self) -> AssembleOptions:
        """How its skills come to the prompt."""
        request = self.request
        return {
            "seam": self.settings.seam,
            "splice": not request.recompute,
            "strict": request.strict,
            "exact": request.exact,
            "counted": True,
        }


def resolve_request(
    workspace: Workspace, request: Request, callbacks: Callbacks, *, dry: bool = False
) -> ResolvedRequest:
    """Open the skills of a request without a session, and settle it. `dry`: texts are not compiled."""
    begun = time.perf_counter()
    check_no_results(request)
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
    unheard: Mapping[str, str] | None = None,
    goes_on: bool = False,
    grammar: str | None = None,
    begun: float | None = None,
) -> ResolvedRequest:
    """Settle what holds for a request with these skills and images, and tell what of that is worth telling. `had`: the
    skills that its session has already, None without a session; one that `goes_on` amends them by edits alone.
    `unheard`: what everybody is told of these, by field, and it was not yet. `begun`: when it was asked; None: now."""
    _ = workspace.context  # making it is a part of opening
    ready, before = time.perf_counter(), had or ()
    segments = with_unique_names(segments, [one.name for one in before])
    request = _corrected(workspace, request, segments, callbacks.on_notice, before, unheard or {})
    _tell_meant(request, [*before, *segments], callbacks.on_notice)
    stated = False
    if had is None:  # a session keeps the text of its skills as it was compiled
        fields, errata = as_new_values(request.errata, request.fields, segments)
        stated = len(errata) < len(request.errata)
        request = replace(request, fields=fields, errata=errata)
    settings = _settings(workspace, request, segments, callbacks.on_notice, had is not None, goes_on, stated)
    return ResolvedRequest(request, segments, settings, ready if begun is None else begun, ready, grammar)


def check_no_results(request: Request) -> None:
    """Raise SessionError for results of tools: the calls that they answer are in a session."""
    if request.results:
        raise SessionError("results of tools go with a session, whose last answer has called them")


def constraint_of(workspace: Workspace, request: Request) -> str | None:
    """The grammar that the answer is held to; None without one. Raise GrammarError for one that cannot be used."""
    if request.json_schema is None and request.grammar is None:
        return None
    from notes_cli.guidance import Grammar
    from notes_cli.text.grammar import gbnf_grammar
    from notes_cli.text.schema import schema_grammar

    given = [request.json_schema is not None, request.grammar is not None, request.choices is not None]
    if sum(given) > 1:
        raise GrammarError("an answer can be held to one of: a JSON schema, a grammar, choices", "Leave the others out")
    if request.grammar is None:
        grammar = schema_grammar(request.json_schema)
    else:  # a server has read it already
        grammar = request.grammar if isinstance(request.grammar, Grammar) else gbnf_grammar(request.grammar)
    check_usable(workspace, grammar)
    return grammar


def check_usable(workspace: Workspace, grammar: str) -> None:
    """Raise GrammarError for a grammar that was read and cannot be used with the vocabulary of the model."""
    from notes_cli.engine.constraint import Constraint

    Constraint(workspace.model, grammar)


def open_requested(workspace: Workspace, request: Request, callbacks: Callbacks, *, dry: bool = False) -> list[Segment]:
    """The segments of the skills that a request splices, then those of its images (opening.py)."""
    opened = partial(open_segments, workspace, say=callbacks.on_notice, watch=callbacks.progress, dry=dry)
    return [*opened(request.splice), *opened(request.images, image=True)]


def with_unique_names(segments: Iterable[Segment], taken: Iterable[str] = ()) -> list[Segment]:
    """The segments, an image whose name is taken, or that another before it has, by another name: it may be shown
    twice."""
    seen = set(taken)
    named: list[Segment] = []
    for one in segments:
        name, number = one.name, 1
        while one.is_image and name in seen:
            number += 1
            name = f"{one.name}-{number}"
        seen.add(name)
        named.append(one if name == one.name else replace(one, name=name))
    return named


def global_errata(workspace: Workspace) -> Sequence[GlobalErratum]:
    """What everybody is told, as it is now."""
    library = workspace.library
    if not isinstance(library, Library) or not (library.folder / ERRATA).exists():
        return ()
    from notes_cli.library.standing import GlobalErrata

    return GlobalErrata(library.folder).all()


def _corrected(
    workspace: Workspace,
    request: Request,
    segments: Sequence[Segment],
    say: Say,
    had: Sequence[Fielded],
    unheard: Mapping[str, str],
) -> Request:
    """The request with what everybody is told of the skills that come with it, unless it says something itself. `had`:
    the skills that were there before, of which that is `unheard`."""
    errata = global_errata(workspace) if segments else ()
    if not errata and not unheard:
        return request
    from notes_cli.library.standing import holding, marks_of

    known = known_fields(*had, *segments)
    own = {one.key for one in read_errata(request.errata, known) if one.field}
    own |= {one.key for name in request.fields for one in known.find(name)}
    told = dict(unheard)
    for segment in segments:
        fields = {span.name: span.value for span in segment.fields}
        held = holding(errata, segment.name, fields, marks_of(segment.source, segment.text))
        told |= {f"{segment.name}.{name}": value for name, value in held.items()}
    said = []
    for name, value in told.items():
        key = known.find(name)[0].key
        if key not in own:
            said.append(f"{key}={value}")
            say(Notice(f"{key} is {value}: a correction for all sessions"))
    return replace(request, errata=(*said, *request.errata))


def _settings(
    workspace: Workspace,
    request: Request,
    segments: Sequence[Segment],
    say: Say,
    session: bool,
    goes_on: bool,
    stated: bool,
) -> Settings:
    """`session`: the profile holds without skills, too. `stated`: an erratum gives one of the new values."""
    _check_seam(request.seam or 0, segments)
    if request.wording:
        word(Erratum("", "", ""), request.wording)  # raises for one that there is not, also where nothing is worded
    think = requests_reasoning(workspace, request.think, request.max_think)
    # Without skills nothing goes by the profile, and a model need not be read for it.
    found = defaults(workspace, think=think) if segments or session else UNMEASURED
    if found.note:
        say(Notice(found.note.what, found.note.remedy, warning=True))
    wording = request.wording or found.wording or shipped_wordings().default
    seam = found.seam if request.seam is None else request.seam
    told = composition_warning(found.composition, [one.name for one in segments], _decoded(request, segments), seam)
    if told and not request.recompute and not think:  # it was measured without a chain of thought
        say(told)
    method, why = (None, None) if goes_on else _method(workspace, request, segments, think, stated)
    return Settings(think, wording, request.place or found.place, seam, method, why)


def requests_reasoning(workspace: Workspace, wanted: bool, most: int) -> bool:
    """Whether the model is asked for a chain of thought, of `most` tokens: a cue without one would only mislead, so
    such a model is asked directly."""
    return wanted and (most > 0 or bool(workspace.reasoning.open))


def _check_seam(seam: int, segments: Sequence[Segment]) -> None:
    """Raise NotesError for a seam that leaves nothing of a skill to splice."""
    for segment in segments:
        if seam >= len(segment) and not segment.media:  # of an image what precedes its rows, whatever is asked
            what = f"a seam of {seam} tokens leaves nothing of {segment.name} to splice, which has {len(segment)}"
            raise NotesError(what, Help.SHORTER_SEAM())


def _method(
    workspace: Workspace, request: Request, segments: Sequence[Segment], think: bool, stated: bool
) -> tuple[Method | None, str | None]:
    """The method that was named, or the one that fits, and why; None where nothing is amended. `stated`: one that
    appends an erratum."""
    if not request.fields:
        return None, None
    if request.method:
        if request.exact and not request.method.record.exact:
            what = f"{request.method} leaves rows that were computed with the old value, and exact rows were asked for"
            raise NotesError(what, Help.OTHER_METHOD(method=f"{SUFFIX} or {ERRATUM}"))
        return request.method, None
    if request.recompute and not stated:
        return RECOMPUTE, f"{RECOMPUTE}: nothing is spliced"
    prompt = Prompt(request.question, segments, fields=request.fields, think=think)
    method, why = method_for(workspace, prompt, stated=stated)
    if request.exact and not method.record.exact:
        return ERRATUM, f"{ERRATUM}: exact rows were asked for, and {method} leaves some of the old value"
    return method, why


def method_for(workspace: Workspace, prompt: Prompt, *, stated: bool = False) -> tuple[Method, str]:
    """The edit method for the prompt's values where the user names none, and why; `stated`: that appends an erratum."""
    if any(
        one.skill == segment.name
        for segment in prompt.segments
        if segment.media
        for one, _ in resolve_values(prompt.fields, prompt.segments)
    ):
        return ERRATUM, f"{ERRATUM}: a skill that it corrects has an image, and no rows of such a one are edited"
    return choose(workspace, list(changes_of(workspace, prompt).values()), think=prompt.think, stated=stated)


def _tell_meant(request: Request, skills: Sequence[Fielded], say: Say) -> None:
    """Tell which fields `*.field` stands for, and which errata with an equals sign are of none."""
    fields = known_fields(*skills)
    for told in describe_wildcards([*request.errata, *request.fields], fields):
        say(Notice(told))
    for text in request.errata:
        if "=" in text and parse_erratum(text, fields).field is None:
            what = f"no skill has a field {text.partition('=')[0].strip()!r}: {text.strip()!r} is added as free text"
            say(Notice(what))


def _decoded(request: Request, segments: Sequence[Segment]) -> frozenset[str]:
    """The names of the skills that are to be decoded. Raise SkillError for one that is not to be spliced."""
    names = {one.name: one.name for one in segments}
    words = zip(request.splice, segments, strict=False)
    names |= {os.fspath(word): segment.name for word, segment in words if not isinstance(word, Segment)}
    for one in request.decode:
        if one not in names:
            what = f"{one} is to be decoded, and is none of the skills to splice"
            raise SkillError(what, f"They are: {listed(sorted(set(names.values())))}")
    return frozenset(names[one] for one in request.decode)
