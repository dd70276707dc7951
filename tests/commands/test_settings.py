"""Sources of settings: flags, variables, config.yaml, the session; and messages about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.config import resource

from .conftest import Notes, on_a_terminal, run_here

ASK = ("ask", "Why?", "-n", 2)


def test_a_typing_error_is_an_error(notes: Notes, home: Path) -> None:
    """Exit 1 and one line from every command; help works. (Others: tests/messages.yaml.)"""
    home.mkdir()
    (home / "config.yaml").write_text("modell: a.gguf")
    for arguments in (ASK, ("ls",)):
        outcome = notes(*arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert "no setting 'modell' in config.yaml. Did you mean model?" in outcome.err
    assert notes("ask", "--help").code == 0


def test_settings_of_other_commands_are_no_errors(notes: Notes, home: Path) -> None:
    """Other commands ignore settings of one command; a section may hold its options; _ equals -."""
    home.mkdir()
    (home / "config.yaml").write_text("top_k: 3\nblocks: headings\nsession: {force: true}\nask: {predict: 2}\n")
    outcome = notes("ask", "Why?", "--json")
    assert (outcome.code, outcome.json["sampling"]["top_k"], outcome.json["tokens"]["answer"]) == (0, 3, 2)
    assert notes("ls", "-q").code == 0


def test_json_as_a_setting(notes: Notes, home: Path) -> None:
    """`json: true` is --json, for errors, too."""
    home.mkdir()
    (home / "config.yaml").write_text("json: true\n")
    assert notes("ls").json == []
    assert notes("session", "show", "nobody").json["error"]["status"] == 1


@pytest.mark.model
def test_the_model_that_ships_says_what_it_is(home: Path) -> None:
    """Once a call, on stderr, with how to name another; not for scripts, and not where it was named."""
    asked = run_here(*ASK)
    said = [line for line in asked.err.splitlines() if "demonstration" in line]
    assert len(said) == 1 and said[0].endswith("Yours: -m FILE")
    returns = SAMPLES / "returns"
    assert "demonstration" in run_here("compile", returns).err
    assert run_here("compile", returns, "-q").err == ""
    assert "demonstration" not in run_here(*ASK, "--json").err
    assert "demonstration" not in run_here(*ASK, "-m", resource("models") / "notes-tiny-q8_0.gguf").err


@pytest.fixture
def begun(notes: Notes, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A session `mine`, begun with a model of its own that nothing names any more; its file."""
    path = tmp_path / "my model.gguf"
    shutil.copy(model, path)
    assert notes(*ASK, "--session", "mine", "-m", path, "-ctk", "bf16").code == 0
    monkeypatch.delenv("NOTES_MODEL")
    return path


def test_a_session_remembers_its_model(
    notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Path]
) -> None:
    """Model and cache types are the session's, not those of settings; an explicit other model is refused."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("qwen2")))
    outcome = notes("ask", "And?", "-n", 2, "--session", "mine")
    assert outcome.code == 0, outcome.err
    assert notes("session", "compact", "mine").code == 0
    assert notes("verify", "--session", "mine", "--question", "Why?").code == 0
    refused = notes("ask", "And?", "--session", "mine", "-m", make_model("qwen2"))
    assert refused.code == 1 and f"Its model: {begun}" in refused.err
    refused = notes("ask", "And?", "--session", "mine", "-ctk", "f16")
    assert refused.code == 1 and "bf16/f16" in refused.err


def test_a_session_whose_model_is_another_one_now(notes: Notes, begun: Path, make_model: Callable[..., Path]) -> None:
    """As after an update of the shipped model: an error with advice, and nothing is lost."""
    former = begun.read_bytes()
    shutil.copy(make_model(seed=1), begun)
    refused = notes("ask", "And?", "-n", 2, "--session", "mine")
    assert refused.code == 1 and refused.err.endswith(
        f". {begun} is another model since then: begin another session, or put the former one there\n"
    )
    begun.write_bytes(former)
    assert notes("ask", "And?", "-n", 2, "--session", "mine").code == 0


def test_a_session_whose_model_has_gone(notes: Notes, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the model's name; with -m, moved or not, the session continues."""
    moved = begun.rename(begun.with_name("moved.gguf"))
    lost = notes("ask", "And?", "--session", "mine")
    assert lost.code == 1 and lost.err.count("\n") == 1
    assert f"begun with tiny llama F32 ({begun})" in lost.err
    assert notes("ask", "And?", "-n", 2, "--session", "mine", "-m", moved).code == 0
    monkeypatch.setenv("NOTES_MODEL", str(moved))
    assert notes("ask", "And?", "-n", 2, "--session", "mine").code == 0


def test_a_relative_model_is_found_from_anywhere(
    notes: Notes, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ledger keeps where the file is, not how it was named."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(model.parent)
    assert notes(*ASK, "--session", "mine", "-m", model.name).code == 0
    monkeypatch.delenv("NOTES_MODEL")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert notes(*ASK, "--session", "mine").code == 0


def test_an_answer_without_a_limit(notes: Notes) -> None:
    """-n -1, also as --n-predict: until the answer ends or the context is full, which is flagged."""
    for form in (("-n", -1), ("--n-predict", "-1"), ("--predict=-1",)):
        outcome = notes("ask", "Why?", "-c", 300, *form, "--json")
        assert outcome.code == 0 and outcome.json["stopped"] in ("end", "context")
        assert outcome.json["tokens"]["answer"] > 0
    assert notes("ask", "Why?", "-n", -2).code == 2


def test_a_question_as_llama_cpp_takes_it(notes: Notes, tmp_path: Path) -> None:
    """-p is the question, -f a text before it, after piped text; each works alone."""
    text = tmp_path / "über.txt"
    text.write_text("A text.\n", encoding="utf-8-sig")

    def total(*arguments: object, stdin: str = "") -> int:
        outcome = notes("ask", *arguments, "-n", 1, "--json", stdin=stdin)
        assert outcome.code == 0, outcome.err
        return int(outcome.json["tokens"]["total"])

    assert total("-p", "Why?") == total("Why?") == total(stdin="Why?\n") == total("-f", "-", stdin="Why?")
    assert total("-f", text) == total("A text.")
    assert total("-f", text, "-p", "Why?", stdin="Piped.") == total("Piped.\n\nA text.\n\nWhy?")
    for arguments, message in (
        (("Why?", "-p", "How?"), "two questions, 'Why?' and --prompt"),
        (("-f", tmp_path / "none"), "No such file"),
        (("-f", tmp_path), "Is a directory"),
    ):
        wrong = notes("ask", *arguments)
        assert wrong.code == 2 and message in wrong.err and wrong.err.count("\n") == 1


def test_a_variable_of_several_values(
    notes: Notes, skill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path and a correction with blanks are one each."""
    other = tmp_path / "our desk.txt"
    other.write_text("plan: basic\n\nAsk at the desk.\n")
    monkeypatch.setenv("NOTES_ASK_SPLICE", f"{skill}\n{other}\n")
    monkeypatch.setenv("NOTES_ASK_ERRATUM", "plan=very basic")
    asked = notes("ask", "Why?", "-n", 1, "--json")
    assert asked.code == 0, asked.err
    assert {one["name"] for one in asked.json["pieces"] if one["kind"] == "splice"} == {"returns", "our-desk"}
    assert [one["kind"] for one in asked.json["pieces"]].count("erratum") == 1


@pytest.mark.model
def test_keys_of_a_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable holds a key per line; a line warns if a flag overrides it."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr("notes_cli.serve.server.serve", lambda service, *_: found.append(service.options.keys))
    monkeypatch.setenv("NOTES_API_KEY", "correct horse\n\nbattery staple\n")
    assert "NOTES_API_KEY" not in run_here("serve", "--port", 0).err
    assert "NOTES_API_KEY is ignored" in run_here("serve", "--port", 0, "--api-key", "staple").err
    assert found == [("correct horse", "battery staple"), ("staple",)]


def test_loading_a_large_model_is_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, before it takes time; a small one is there at once."""
    shown = on_a_terminal(["ask", "Why?", "-n", "1"], "import notes_cli.commands.options as o; o.LARGE = 1")
    assert f"loading {model.name}" in shown
    assert "loading" not in on_a_terminal(["ask", "Why?", "-n", "1"])


def test_compiling_on_the_way_is_shown(model: Path, skill: Path) -> None:
    """`ask --splice TEXT` compiles, with a line before."""
    shown = on_a_terminal(["ask", "Why?", "-n", "1", "--splice", str(skill)])
    assert "compiling returns" in shown


def test_verifying_is_shown(model: Path, tmp_path: Path) -> None:
    """Each recompute that takes a while, of skills, edits and sessions alike."""
    long = tmp_path / "long.txt"
    long.write_text("tier: gold\n\n" + "A line of a long text.\n" * 40)
    ask = ("--question", "Why?", "--choices", "a,b")
    assert run_here("ask", "Why?", "--splice", long, "--session", "mine", "-n", 1).code == 0
    for what in (["long"], ["long", "--field", "tier=b", "--method", "erratum"], ["--session", "mine"]):
        shown = on_a_terminal(["verify", *what, *ask], status=(0, 1))
        assert "recomputing" in shown
