"""Tests reading skills from files, folders and standard input, and all their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import with_values

from notes_cli.config import skill_folders
from notes_cli.errors import SkillError
from notes_cli.text import skill
from notes_cli.text.skill import find_skills, joined, load_skill, parse_skill, skill_sources

from ..refused import refused

FRONT = "---\nname: returns\ndescription: About returns.\nfields:\n  date: 2026-06-01\n  amount: 120\n---\n"


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_files_and_folders(tmp_path: Path) -> None:
    """The name is that in the front matter, else of file or folder; an odd one is a warning. Line breaks are
    normalised, byte order mark and surrounding blanks removed. YAML would convert a date and a number."""
    skill = load_skill(write(tmp_path, "skill.txt", b"\xef\xbb\xbf\r\n# A\r\ndate: 2026-06-01\r\n\r\n"))
    assert (skill.name, skill.text, skill.values) == ("skill", "# A\ndate: 2026-06-01", {"date": "2026-06-01"})
    assert skill.warnings == ()
    skill = load_skill(write(tmp_path, "returns/SKILL.md", FRONT + "By {{date}}, up to {{amount}}.\n"))
    assert skill.text == "By 2026-06-01, up to 120." and skill.values == {"date": "2026-06-01", "amount": "120"}
    assert (skill.name, skill.description, skill.warnings) == ("returns", "About returns.", ())
    write(tmp_path, "pdf-tools/SKILL.md", "---\ndescription: d\n---\nRead it.")
    assert load_skill(tmp_path / "pdf-tools").name == "pdf-tools"
    with pytest.raises(SkillError, match=r"has no SKILL\.md"):
        load_skill(tmp_path)
    skill = load_skill(write(tmp_path, "folder/SKILL.md", "---\nname: My Skill!\n---\nText."))
    assert skill.name == "my-skill"
    assert [part in "".join(skill.warnings) for part in ("no description", "'My Skill!'", "its folder")] == [True] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "has no text") for text in ("", " \n\n", "---\nname: a\n---\n", "\ufeff")),
        *((b"caf\xe9", "not UTF-8 text: invalid byte at offset 3"), ("---\nname: a\n", "is not closed")),
        ("---\nfields: {a: 1, a: 2}\n---\nx", "the key 'a' is there already"),
        ("---\na: " + "x" * 70_000 + "\n---\nx", "front matter is longer than 64 KiB"),
        *(
            (f"---\nfields:\n  a: 1\n  b{rest}\n---\nx", "line 2: fields in the front matter")
            for rest in ("", ": x: y")
        ),
        ("\n---\nfields:\n  a: x: y\n", "front matter that line 2 opens is not closed"),
        ("---\nname: a\n---\ncaf\u00e9".encode("latin-1"), "not UTF-8 text: invalid byte at offset 19"),
        ("---\nfields: [a]\n---\nx", "fields in the front matter must be"),
        ("---\nfields:\n  a=b: 1\n---\nx", "field name 'a=b' must be a word"),
        ("---\nfields:\n  a.b: 1\n---\nx", "field name 'a.b' must be a word"),
        ("---\nfields:\n  x y: 1\n  x  y: 2\n---\nx", "field 'x y' is in the front matter twice"),
        ("---\nfields: {" + ", ".join(f"f{i}: v" for i in range(1001)) + "}\n---\nx", "more than 1,000 fields"),
        ("---\nfields: {a: " + "v" * 1001 + "}\n---\nx", "is longer than 1,000 characters"),
        ("---\nfields:\n  a: {b: 1}\n---\nx", "field 'a' has an unknown key 'b' in the front"),
        ("---\nfields:\n  a: {value: [1]}\n---\nx", "the value of field 'a' must be text"),
        ("---\nfields:\n  a: {value: 1, hoist: perhaps}\n---\nx", "hoist of field 'a' must be true or false"),
        ("---\nfields:\n  a: {hoist: true}\n---\nx", "field 'a' has no value in the front matter"),
        ("---\nfields:\n  a: {}\n---\nx", "field 'a' has no value in the front matter"),
        ("---\nfields:\n  a:\n---\nx", "field 'a' has no value"),
        ('---\nfields:\n  a: "1\\n2"\n---\nx', "more than one line"),
        ("---\nfields:\n  tier: gold\n---\ngold {{tiers}}", "no such field has a value. Did you mean 'tier'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, "bad.md", text)
    with pytest.raises(SkillError, match=message) as caught:
        load_skill(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_in_another_form_of_unicode(tmp_path: Path) -> None:
    """As macOS has it: the same name."""
    folder = tmp_path / "cafe\u0301"
    folder.mkdir()
    (folder / "SKILL.md").write_text("---\nname: caf\u00e9\ndescription: x\n---\nfee: 12\n")
    assert load_skill(folder).warnings == () and load_skill(folder).name == "caf\u00e9"


def test_a_hoisted_field() -> None:
    """It is written as a mapping; its new value replaces the old one."""
    text = "---\nfields:\n  date: {value: 2026-06-01, hoist: true}\n  tier: {value: gold, hoist: false}\n---\n"
    skill = parse_skill(text + "tier: gold\ndate: 2026-06-01\nBefore {{date}}.", source="s", default="s")
    assert skill.text == "tier: gold\nBefore [date].\n\ndate: 2026-06-01"
    assert with_values(skill, {"date": "1 May"}).text == "tier: gold\nBefore [date].\n\ndate: 1 May"


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any script; a line break would separate two files and is spelt. If no character of the word can be in a name,
    the error asks for one. A huge file is not read."""
    assert load_skill(write(tmp_path, "a\nb.txt", "Be brief.")).source == str(tmp_path / "a\\x0ab.txt")
    for name in ("規則", "rückgabe", "λόγος"):
        skill = load_skill(write(tmp_path, f"{name}.txt", "Text."))
        assert (skill.name, skill.warnings) == (name, ())
    (warning,) = load_skill(write(tmp_path, "Rückgabe 2.txt", "Text.")).warnings
    assert "'Rückgabe 2' may only have lower-case letters" in warning and warning.endswith("it becomes 'rückgabe-2'")
    for source in (write(tmp_path, "🙂.txt", "Text."), write(tmp_path, "a.txt", "---\nname: '!'\n---\nText.")):
        with refused(SkillError, r"has no letter and no digit\. Give it another: --name NAME"):
            load_skill(source)
        assert load_skill(source, name="smile").name == "smile"
    monkeypatch.setattr("notes_cli.text.skill.MAX_BYTES", 10)
    with pytest.raises(SkillError, match="Is it a text"):
        load_skill(write(tmp_path, "model.gguf", b"x" * 11))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text crashes the reader, and every span holds its value."""
    try:
        skill = parse_skill(text, source="s", default="s")
    except SkillError:
        return
    assert all(skill.text[f.start : f.end] == f.value for f in skill.fields)


def test_a_folder_of_skills_is_each_of_them(tmp_path: Path) -> None:
    """They are sorted by name; a skill's own subfolders belong to it."""
    for name in ("b", "a/references", "a", "c"):
        write(tmp_path, f"{name}/SKILL.md" if name != "c" else "c/notes.csv", "x")
    assert skill_sources(str(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert skill_sources(str(tmp_path / "a")) == [str(tmp_path / "a")]
    assert skill_sources("-") == ["-"] and skill_sources("no-such") == ["no-such"]
    with pytest.raises(SkillError, match=r"has no SKILL\.md"):
        skill_sources(str(tmp_path / "c"))
    for name in ("c/notes.txt", "c/guide.MD", "c/deep/more.txt"):
        write(tmp_path, name, "x")
    found = [Path(source).name for source in skill_sources(str(tmp_path / "c"))]
    assert found == ["guide.MD", "notes.txt"]
    write(tmp_path, "c/a.png", "x")
    assert skill_sources(str(tmp_path / "c")) == [str(tmp_path / "c" / "a.png")]


def test_linked_files_are_said_to_be_left_out(tmp_path: Path) -> None:
    """One warning names them; URLs, anchors and examples in code are not files."""
    write(tmp_path, "s/scripts/run.py", "x")
    text = (
        "---\ndescription: d\n---\nSee [a](references/a.md#top), [b](b.md), ![p](p.png) and scripts/run.py.\n"
        "[site](https://example.org/x.md) [here](#here) [mail](mailto:x@y) scripts/none.py /scripts/run.py\n"
        "```\n[code](c.md)\n```\n"
    )
    (warning,) = load_skill(write(tmp_path, "s/SKILL.md", text)).warnings
    assert warning.endswith("links to references/a.md, b.md, scripts/run.py: linked files are not compiled with it")
    assert not load_skill(
        write(tmp_path, "t/SKILL.md", "---\ndescription: d\n---\n[x](https://x.org) a[1](2:3)")
    ).warnings


# Skills that are joined.


def test_texts_are_in_order_and_fields_where_they_are() -> None:
    """Each span has its value; contradicting values are no field, which a warning reports."""
    first = parse_skill("date: 2026-06-01\ntier: gold\n\nFirst.", source="-", default="a")
    second = parse_skill("---\nname: b\ndescription: B.\n---\ntier: basic\nplan: team", source="-", default="b")
    both = joined([first, second], "ab")
    assert both.text == f"{first.text}\n\n{second.text}" and (both.name, both.description) == ("ab", "B.")
    assert both.values == {"date": "2026-06-01", "plan": "team"} and both.source == "-"
    assert all(both.text[one.start : one.end] == one.value for one in both.fields)
    assert len(both.warnings) == 1 and "'tier' has different values in a, b" in both.warnings[0]


# Skills in the folders of agents.


def put(folder: Path, name: str, text: str = "A rule.", description: str = "What it does.") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n---\n{text}\n")
    return folder / name


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "package" / "source").mkdir(parents=True)
    return tmp_path / "project"


def test_the_folders_go_up_to_the_root_of_the_repository_and_no_further(project: Path, tmp_path: Path) -> None:
    """Folders above it belong to others, as all do without a repository; the user's own come last, and once."""

    def folders(where: Path) -> list[Path]:
        return [level[0].parent.parent for level in skill_folders(where)]

    package = project / "package"
    assert folders(package / "source") == [package / "source", package, project, Path.home()]
    assert [folder.parent.name for folder in skill_folders(project)[0]] == [".agents", ".claude"]
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert folders(tmp_path / "a" / "b") == [tmp_path / "a" / "b", Path.home()] and len(folders(Path.home())) == 1


def test_the_nearer_skill_hides_the_farther_one(project: Path) -> None:
    """Project hides user, package hides repository; hidden ones are reported."""
    here = put(project / "package" / ".claude" / "skills", "pdf")
    root = put(project / ".agents" / "skills", "pdf", "Another.")
    mine = put(Path.home() / ".agents" / "skills", "pdf", "Mine.")
    put(Path.home() / ".claude" / "skills", "mail")
    found = {one.name: one for one in find_skills(skill_folders(project / "package"))}
    assert list(found) == ["mail", "pdf"]
    assert (found["pdf"].path, found["pdf"].hides) == (here, (root, mine)) and found["pdf"].problem is None
    assert found["mail"].description == "What it does." and not found["mail"].hides


def test_two_skills_that_are_equally_near(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem names both instead of choosing. Copies and links of one skill are one. A link to a huge folder is
    refused instead of searched."""
    agents, claude = project / ".agents" / "skills", project / ".claude" / "skills"
    put(agents, "pdf")
    put(claude, "pdf", "Another.")
    put(agents, "copied")
    put(claude, "copied")
    put(agents, "linked")
    (claude / "linked").symlink_to(agents / "linked")
    found = {one.name: one for one in find_skills(skill_folders(project))}
    assert found["copied"].problem is None and found["linked"].problem is None
    problem = found["pdf"].problem
    assert problem and str(agents / "pdf") in str(problem) and str(claude / "pdf") in str(problem)
    monkeypatch.setattr(skill, "MAX_SKILLS", 1)
    with refused(SkillError, "more than 1 skills"):
        find_skills(skill_folders(project))
