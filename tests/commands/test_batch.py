"""`notes ask --batch`: lines of JSON in, lines of JSON out, in order; one bad line spoils nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from notes_cli.commands.ask import KEYS, LONGEST

from .conftest import Notes, Outcome, command_line, snapshot, without_uses
from .test_json import documented, flat
from .test_messages import KEPT, written_at_the_end

SINGLE = {"session", "memory", "server", "identity"}  # keys of `ask --json` that are not of one answer


def lines(*values: object) -> str:
    return "".join(
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n" for value in values
    )


def answers(outcome: Outcome) -> list[Any]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def same(line: Any) -> Any:
    """Return the keys of a line that equal those of a single `notes ask --json`, without times."""
    tokens = {key: value for key, value in line["tokens"].items() if key != "shared"}
    return tokens, [line[key] for key in ("answer", "choice", "stopped", "reasoning", "pieces", "sampling")]


def test_a_line_has_its_own_options_and_those_of_the_command(notes: Notes, compiled: Path, tmp_path: Path) -> None:
    """A string, an object or plain text; from a file or standard input. tests/test_interfaces.py has all options."""
    texts = (
        *('"Why?"', {"question": "Où?", "id": {"a": [1]}, "max_tokens": 3, "max-think": 3}, "", "Où, 日本? {}", "7"),
        *('{"question": "Why?", "splice": [], "id": "é\u202e"}', "null", "- May I?"),
    )
    source = tmp_path / "questions.jsonl"
    source.write_text(lines(*texts), encoding="utf-8")
    ask = ("ask", "--seed", 5, "-n", 5)
    found = notes(*ask, "--splice", "returns", "--batch", source)
    assert (found.code, found.err) == (0, "") and "\\u202e" in found.out and "é" in found.out
    got = answers(found)
    ids = [(1, None), (2, {"a": [1]}), (4, None), (5, None), (6, "é\u202e"), (7, None), (8, None)]
    assert [(line["line"], line["id"]) for line in got] == ids
    assert [line["question"] for line in got] == ["Why?", "Où?", "Où, 日本? {}", "7", "Why?", "null", "- May I?"]
    spliced = ("--splice", "returns")
    singles = [
        *(("Why?", *spliced), ("Où?", "-n", 3, *spliced), ("Où, 日本? {}", *spliced), ("7", *spliced), ("Why?",)),
        *(("null", *spliced), ("-p", "- May I?", *spliced)),
    ]
    assert [same(line) for line in got] == [same(notes(*ask, *single, "--json").json) for single in singles]
    piped = answers(notes(*ask, "--splice", "returns", "--batch", "-", stdin=source.read_text()))
    assert [same(line) for line in piped] == [same(line) for line in got]


def test_bad_lines_are_errors_in_their_place(notes: Notes, compiled: Path) -> None:
    """Messages are those of messages.yaml; other lines are answered; the exit status is 1."""
    entries = KEPT["lines"]
    long = {"[" * 100_000: "the line is not JSON", json.dumps("long " * 2000): "was trained for"}
    bad = [*entries, *long]
    ask = ("ask", "--splice", "returns", "-n", 2, "--seed", 5, "--batch", "-")
    found = notes(*ask, stdin=lines('"Why?"', *bad, '"Why?"'))
    got = answers(found)
    assert found.code == 1
    assert found.err == f"notes: {len(bad)} of {len(bad) + 2} lines failed. The output says why, line by line\n"
    assert [line["line"] for line in got] == list(range(1, len(bad) + 3))
    assert all(line.keys() == {"version", "line", "id", "question", "error", "warnings"} for line in got[1:-1])
    with written_at_the_end():
        for line, given in zip(got[1:-3], entries, strict=True):
            if "MESSAGES" in os.environ:
                entries[given] = line["error"]["message"]
            assert line["error"] == {"message": entries[given], "status": 1}
    for line, message in zip(got[-3:-1], long.values(), strict=True):
        assert message in line["error"]["message"]
    assert same(got[0]) == same(got[-1])


def test_null_is_as_if_the_key_were_not_there(notes: Notes, compiled: Path) -> None:
    ask = ("ask", "--splice", "returns", "-s", "Be kind.", "--seed", 5, "--field", "tier=basic", "--method", "field")
    other = ("--choices", "yes,no", "--seam", 3, "--place", "late", "--wording", "line", "--decode", "returns")
    keys = [key for key in KEYS if key != "question"]
    given = lines('"Why?"', *({"question": "Why?", key: None} for key in keys))
    plain, *others = answers(notes(*ask, *other, "--batch", "-", stdin=given))
    settings = ("method", "place", "seam", "wording")
    for key, null in zip(keys, others, strict=True):
        assert "error" not in null and same(null) == same(plain), key
        assert [null[one] for one in settings] == [plain[one] for one in settings], key


def test_bytes_that_are_no_text_and_lines_without_end(notes: Notes) -> None:
    """And a choice that a line holds itself to is its own by any spelling, also where its key has a dash."""
    long = b'"' + b"x" * LONGEST + b'"\n'
    found = notes("ask", "-n", 2, "--batch", "-", stdin=b'\xef\xbb\xbf"Why?"\r\n"\xff"\n' + long + b'\n\n"Why?"')
    got = answers(found)
    assert [line["line"] for line in got] == [1, 2, 3, 6]
    assert got[0]["answer"] == got[3]["answer"]
    assert "not UTF-8 (byte 1)" in got[1]["error"]["message"] and "longer than 16 MiB" in got[2]["error"]["message"]
    (own,) = answers(notes("ask", "--choices", "a,b", "--batch", "-", stdin='{"question": "x", "json-schema": true}'))
    assert "error" not in own and own["choice"] is None


def test_errata_of_a_line_may_be_an_object(notes: Notes, compiled: Path) -> None:
    """Of fields and values, as in Python and over HTTP; a field that no skill has is an error."""
    errata = [["date=2026-07-01"], {"date": "2026-07-01"}, {"we say x": "1"}]
    asked = lines(*({"question": "Why?", "errata": one} for one in errata))
    one, other, wrong = answers(notes("ask", "--splice", "returns", "-n", 2, "--batch", "-", stdin=asked))
    assert one["pieces"] == other["pieces"] and one["method"] == "field+erratum"
    assert wrong["error"]["message"].startswith("no spliced skill has a field 'we say x'. Known fields:")


def test_nothing_to_ask_is_no_error(notes: Notes) -> None:
    assert notes("ask", "--batch", "-", stdin="\n \n") == Outcome(0, "", "")


def test_keys_of_a_line_are_documented(notes: Notes, compiled: Path) -> None:
    """Those of an answer, those of an error, and those that a line may have."""
    keys = documented("ask --batch")
    errors = {key for key in keys if key.startswith("error")}
    found = notes("ask", "--splice", "returns", "-n", 2, "--batch", "-", stdin=lines('"Why?"', "{"))
    good, bad = answers(found)
    head = {"version", "warnings", "line", "id", "question"}
    for document, wanted in ((good, keys.keys() - errors), (bad, head | errors)):
        leaves = flat(document, keys)
        assert {key for key, _ in leaves} == set(wanted)
        assert all(type(value) in keys[key] for key, value in leaves)
    single = notes("ask", "Why?", "--splice", "returns", "-n", 2, "--json").json
    assert good.keys() - {"line", "id", "question"} == single.keys() - SINGLE
    text = (
        (Path(__file__).parents[2] / "docs" / "json.md")
        .read_text()
        .split("\n## Lines of a batch\n")[1]
        .split("\n## ")[0]
    )
    assert all(f"`{key}`" in text for key in KEYS)


def test_sessions_and_the_library_stay_as_they_are(notes: Notes, compiled: Path, home: Path) -> None:
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    before = without_uses(snapshot(home))
    assert notes("ask", "--splice", "returns", "-n", 2, "--batch", "-", stdin='"Why?"\n' * 3).code == 0
    assert without_uses(snapshot(home)) == before


def test_a_setting_for_single_questions_is_no_hindrance(notes: Notes, home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.yaml").write_text("ask:\n  parallel: 2\n  choices: yes,no\n  session: mine\n")
    assert answers(notes("ask", "--batch", "-", stdin='"Why?"'))[0]["choice"] in ("yes", "no")
    (home / "config.yaml").write_text("ask:\n  parallel: 2\n")
    assert notes("ask", "Why?", "-n", 1).code == 0


def test_an_answer_is_there_before_the_last_question_is_read(model: Path) -> None:
    """One at a time: a program may ask, read the answer and ask again."""
    process = subprocess.Popen(
        command_line("ask", "--batch", "-", "--parallel", 1, "-n", 2), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    for number in range(3):
        process.stdin.write(f'{{"question": "Why?", "id": {number}}}\n'.encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == number
    process.stdin.close()
    assert process.wait() == 0


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_an_interrupt_leaves_whole_lines(model: Path, tmp_path: Path, after: float) -> None:
    source = tmp_path / "questions.jsonl"
    source.write_text('{"question": "Why?", "n": 20}\n' * 5000)
    process = subprocess.Popen(
        command_line("ask", "--batch", source), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr
    first = process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    # Not communicate(), which would skip readline()'s buffer.
    rest, err = process.stdout.read(), process.stderr.read()
    assert (process.wait(), err) == (130, "notes: interrupted\n")
    found = [json.loads(line) for line in (first + rest).splitlines()]
    assert (first + rest).endswith("\n") and [line["line"] for line in found] == list(range(1, len(found) + 1))
