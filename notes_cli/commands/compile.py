"""`notes compile`: prefills skills and saves their K/V as segments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import KEPT_TYPES, SOURCES, Target, json_option, library, model_options, open_model
from notes_cli.commands.remedies import collecting, print_callbacks
from notes_cli.commands.terminal import Command, option
from notes_cli.explanations import attributes, storage_type
from notes_cli.text.names import human_time, name_of

if TYPE_CHECKING:
    from notes_cli.api import Model
    from notes_cli.engine.segment import Segment
    from notes_cli.runtime.freshness import Shape, Source, Sources
    from notes_cli.runtime.recompile import Compiled
    from notes_cli.text.skill import Skill
    from notes_cli.text.tools import ToolSet


MOST_BLOCKS = 64


def number_of_blocks(value: Any) -> Any:
    if value == "headings":
        return value
    number = int(value) if str(value).isdecimal() else 0
    if not 1 <= number <= MOST_BLOCKS:
        problem = f"{value} is neither a whole number from 1 to {MOST_BLOCKS} nor the word headings"
        raise click.BadParameter(problem)
    return number


@click.command(cls=Command)
@click.argument("sources", shell_complete=SOURCES, nargs=-1, metavar="[SOURCE...]")
@option(
    "--from SEGMENT",
    "Instead of SOURCE: compile the text of a compiled skill (its name or file) again.",
    name="segment",
)
@option(
    "--all",
    "Every Agent Skill of the project and of the user: .agents/skills and .claude/skills.",
    name="all_",
    is_flag=True,
)
@option("--stale", "Every skill of the library whose text, model or settings have changed since.", is_flag=True)
@option(
    "--together NAME",
    "Compile the SOURCEs as one skill of this name, in their order: each is read after those before it.",
)
@option("--name NAME", "Name in the library.  [default: front matter, folder or file name]")
@option("-o --output", "Write the segment here, not into the library.", name="target", type=Target(path_type=Path))
@option(
    "-f --force", "Compile even if nothing has changed, or replace a skill that came from another file.", is_flag=True
)
@option(
    "--blocks S",
    "Compile the text in S parts, or in one for each heading (headings).",
    rare=True,
    type=number_of_blocks,
)
@option(
    "--kv TYPE",
    "Type of K/V in the file: f16, f16/q8_0 (V alone), q8_0.  [default: f16]",
    type=click.Choice(KEPT_TYPES),
)
@json_option
@model_options
def command(
    sources: tuple[str, ...],
    segment: str | None,
    all_: bool,
    stale: bool,
    together: str | None,
    name: str | None,
    target: Path | None,
    force: bool,
    blocks: Any,
    kv: str | None,
    json_: bool,
    **model: Any,
) -> int:
    """Prefill a skill once and keep its K/V on disk.

    SOURCE is a text file, a SKILL.md with front matter, a folder that holds one, a document (PDF, HTML, DOCX, EPUB,
    notebook; with notes-cli[documents]), an image (PNG, JPEG, WebP, BMP; with --mmproj), or - for standard input. Where
    there is no such file it is the name of a compiled skill, whose file is read again, or that of an Agent Skill in
    .agents/skills or .claude/skills, of the project (from this folder up to the repository's root) or of the user, or
    that of a sample that came with notes.
    Its fields are `key: value` lines, {{placeholders}}, or named in the front matter. The path of the segment goes to
    stdout. A skill that has not changed is not compiled again.

    With a projector an image in a text, ![what it shows](photo.jpg), is looked at in its place. Its file must be in the
    folder of the text's; all other such marks stay text, with a warning that says why, and so do those in code.

    A SOURCE named *.json is a set of tools (OpenAI's form): each is compiled by itself as the model's chat template
    shows it, for requests to `notes serve` that have some of these tools. --blocks 1 compiles them as a whole.

    Of several sources, or a folder of such folders or of images, each is compiled; one that fails does not stop the
    rest, and the exit status is 1 then. Of a folder without images, and without a SKILL.md in it or right below it,
    each text and document in it is compiled.

    With --together, or a + between them, several texts become one skill: what a later one says was read after the
    earlier ones, as in one prompt. Skills that are spliced one after the other have not seen each other; `notes verify
    A B` tells whether that matters. On a model with recurrent layers such a skill is restored at the start of a prompt,
    where of two skills only the first would be. A change of one of the files compiles all of it again.

    A name belongs to the file that its text came from: the text of another file needs another --name, or --force to
    replace what is there.

    With --blocks the parts of a text are compiled independently: none has seen those before it, but a change recompiles
    only the parts that it is in.

    Rows are kept in f16, which serves a K/V cache of any type but f32: that one needs a segment of its own. With --kv
    q8_0 the file is about half as large, and its rows are rounded; they are computed and used as always.

    \b
    Examples:
      notes compile skills/store-handbook   # a file or a folder
      notes compile style-guide             # a sample, or an Agent Skill
      notes compile skills/                 # each skill in it
      echo "fee: 12" | notes compile - --name fees
      notes compile --all                   # all Agent Skills
      notes compile --stale                 # skills whose files have changed
      notes compile skills/api-reference --blocks headings
      notes compile api-reference --kv q8_0 # a file of half the size
      notes compile fees + style-guide      # as one: fees-style-guide
      notes compile fees style-guide --together shop
      notes compile --from fees -m notes-tiny   # its text, for another model
    """
    from notes_cli.runtime.freshness import Shape, Source, Sources, places, skill_from_segment
    from notes_cli.text.skill import TEXTS

    sweeps = [flag for flag, given in (("--all", all_), ("--stale", stale)) if given]
    if bool(sources) + bool(sweeps) + (segment is not None) != 1:
        raise click.UsageError("name a SOURCE to compile, or a compiled skill with --from, or give --all or --stale")
    if sweeps and (name or target):
        raise click.UsageError(f"--name and -o are for one skill, and {sweeps[0]} means all there are")
    words, joins = _expand_sources(sources, together, name, target)
    notify = (lambda text: None) if stale else output.remark
    for source in sources:  # the texts of a folder without skills may surprise
        count = sum(Path(word).parent == Path(source) and word.lower().endswith(TEXTS) for word in words)
        if count:
            each = "a text, which becomes a skill" if count == 1 else f"{count:,} texts, each of which is a skill"
            notify(f"{source} has {each}. Folders below it are left out")
    known = Sources(library(), notify)
    several = (len(words) > 1 and not joins) or bool(sweeps)
    failed: dict[str, str] = {}  # errors by source
    skills: list[Source] = []
    if segment is not None:
        info = library().latest(segment)
        blocks, kv = blocks or len(info.blocks) or None, kv or info.kv
        skills.append(Source(segment, skill_from_segment(info, name)))
    reads: list[tuple[str, Callable[[], Source]]] = [(word, partial(_read, known, word, name)) for word in words]
    if joins:
        joined_name = together or name
        reads = [(joined_name or " + ".join(words), partial(_join, known, words, joined_name))]
    if all_:
        reads += [(str(skill.path), partial(known.agent_skill, skill)) for skill in known.agent_skills().values()]
    if stale:
        reads += [(skill_name, partial(known.library_skill, skill_name)) for skill_name in known.library.names()]
    if sweeps and not reads:
        none = f"no Agent Skills in {', '.join(places())}" if all_ else f"no compiled skills yet in {library().folder}"
        output.say(none)
    for word, read in reads:
        with collecting(failed, word, several=several):
            skills.append(read())
            for warning in skills[-1].warnings:
                output.warn(warning)
    done: list[dict[str, Any]] = []
    if skills:
        with open_model(**model) as opened, opened.compiling():
            for wanted in skills:
                with collecting(failed, wanted.word, several=several):
                    shape = shape_of(opened, known, wanted, Shape(blocks, kv))
                    done.append(_compile(opened, wanted.skill, target, force, shape, fresh_only=bool(stale)))
                    if not json_ and not (stale and done[-1]["up_to_date"]):
                        output.data(done[-1]["path"])
    if json_:
        output.as_json({"version": 1, "compiled": done, "failed": failed})
    elif stale and (same := sum(facts["up_to_date"] for facts in done)):
        output.say(f"{same} of {len(done)} {'was' if same == 1 else 'were'} up to date")
    return 1 if failed else 0


def _expand_sources(
    sources: Sequence[str], together: str | None, name: str | None, target: Path | None
) -> tuple[list[str], bool]:
    """Return the sources, with folders of skills expanded, and True if they become one skill. Raises UsageError for
    options that exclude each other."""
    from notes_cli.text.skill import skill_sources

    plus = "+" in sources
    if plus and (len(sources) % 2 == 0 or any((word == "+") != (i % 2 == 1) for i, word in enumerate(sources))):
        raise click.UsageError("a + goes between two SOURCEs that become one skill, as in: returns + support")
    operands = [source for source in sources if source != "+"]
    words = list(dict.fromkeys(word for source in operands for word in skill_sources(source)))
    joins = plus or together is not None
    if joins and (len(words) < 2 or (together is not None and name) or "-" in words):
        raise click.UsageError("--together NAME joins two SOURCEs or more, no standard input, and is their --name")
    if not joins and len(words) > 1 and (name or target or "-" in words):
        raise click.UsageError(f"--name, -o and - are for one skill, and these are {len(words)}")
    return words, joins


def _read(known: Sources, source: str, name: str | None) -> Source:
    if source == "-" and sys.stdin is not None and sys.stdin.isatty():
        output.say("reading the skill from the terminal; end it with Ctrl-D on a line of its own")
    return known.read(source, name=name, stdin=None if sys.stdin is None else sys.stdin.buffer)


def _join(known: Sources, words: list[str], name: str | None) -> Source:
    from notes_cli.runtime.freshness import Source
    from notes_cli.text.skill import Skill, joined

    skills = [_read(known, word, None).skill for word in words]
    for word, skill in zip(words, skills, strict=True):
        if not isinstance(skill, Skill):
            raise click.UsageError(f"{word} is a set of tools, and --together joins texts")
    name = name or name_of("-".join(skill.name for skill in skills))
    return Source(name, joined([skill for skill in skills if isinstance(skill, Skill)], name))


def shape_of(model: Model, known: Sources, source: Source, options: Shape) -> Shape:
    """Return the compile options of a skill: those given, else those of its segment in the library, else defaults:
    a block, or one for each tool."""
    from notes_cli.runtime.freshness import Shape, shape
    from notes_cli.text.tools import ToolSet

    tools = isinstance(source.skill, ToolSet)
    previous = shape(source, known.library, model.workspace.identity)
    return Shape(options.blocks or (None if tools else previous.blocks), options.kv or previous.kv)


def _compile(
    model: Model, wanted: Skill | ToolSet, target: Path | None, force: bool, shape: Shape, fresh_only: bool = False
) -> dict[str, Any]:
    """Compile one skill, print the outcome, and return its JSON document."""
    from notes_cli.library.container import peek
    from notes_cli.runtime.compile import placement_limits, skill_of

    skill = skill_of(model.workspace, wanted)
    how = attributes(shape, "blocks", "kv")
    compiled = model.bring_up_to_date(skill, output=target, force=force, callbacks=print_callbacks(), **how)
    info = peek(compiled.path)
    values = {span.name: span.value for span in info.fields}
    if compiled.reasons or not fresh_only:
        carried = info.carry is not None
        limits = placement_limits(model.workspace, compiled.tokens, carried=carried) if compiled.reasons else None
        output.remark(_line(skill, compiled, info, list(values)) + (f". {limits}" if limits else ""))
    return {
        "name": skill.name,
        "path": str(compiled.path),
        "tokens": compiled.tokens,
        "fields": values,
        "up_to_date": not compiled.reasons,
        "reasons": list(compiled.reasons),
        **attributes(compiled, "kv", "blocks", "fresh", "decoded"),
        "bytes": info.file_size,
        "ms": {"prefill": None if compiled.seconds is None else round(1000 * compiled.seconds, 3)},
        "warnings": [*skill.warnings, *compiled.warnings],
    }


def _line(skill: Skill, compiled: Compiled, info: Segment, fields: list[str]) -> str:
    """Return the line about a compiled skill: tokens, speed, size, and the names of its fields if they fit."""
    from notes_cli.runtime.recompile import NEW

    part = f", {f'{compiled.decoded:,}' if compiled.decoded else 'none'} of them prefilled"
    part = part if compiled.decoded < compiled.tokens else ""
    line = f"{skill.name}: {compiled.tokens:,} tokens"
    if compiled.seconds:
        line += f"{part} in {human_time(compiled.seconds)} ({compiled.decoded / compiled.seconds:,.0f} tokens/s)"
    elif compiled.reasons:
        line += part
    line += f", {output.human_size(info.file_size)}"
    if skill.picture:
        line += f", an image of {skill.picture.width} x {skill.picture.height} pixels"
    elif info.pictures:
        line += ", an image in it" if len(info.pictures) == 1 else f", {len(info.pictures)} images in it"
    done = [reason for reason in compiled.reasons if reason != NEW] if compiled.reasons else ["up to date"]
    if compiled.blocks > 1:
        fresh = f"{compiled.fresh} of {compiled.blocks} blocks compiled"
        done.append(fresh if compiled.reasons else "in blocks")
    if compiled.kv != "f16":
        done.append(f"kept as {storage_type(info)}")
    end = f" ({'; '.join(done)})" if done else ""
    count = {0: "no fields", 1: "1 field"}.get(len(fields), f"{len(fields)} fields")
    names = f"fields {', '.join(fields)}" if fields else "no fields like fee: 12"
    if skill.picture:
        return line + end
    return output.fitting(f"{line}, {names}{end}", f"{line}, {count}{end}")
