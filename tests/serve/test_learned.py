"""Tests learned blocks: computed while the server is idle, placed wherever they come again, given up for a request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from reference import nmse

from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import decode
from notes_cli.library.segment_files import LEARNED
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.scheduler import Job
from notes_cli.runtime.token_runs import TextIndex, Texts
from notes_cli.serve.learned import LearnedBlocks, Objects, Paragraphs, blocks_of, messages_of
from notes_cli.serve.prepare import Options
from notes_cli.text.skill import Skill

from ..commands.conftest import run_here
from .conftest import Json, Served, started

THINGS = ("chair", "table", "lamp", "shelf", "carpet", "mirror", "clock", "stool", "desk", "bench")
CONTEXT = ContextOptions(n_ctx=4096, n_threads=1)
ROOM = 1 << 20


def part(thing: str, rules: int = 5) -> str:
    lines = (f"Rule {n}: every {thing} must be brought back within {13 * n} days." for n in range(1, rules + 1))
    return f"## About the {thing}\n\n" + "\n".join(lines)


def tool(thing: str) -> Json:
    text = f"Look for a {thing} in the store, by its color, its size, the room that it is for, and the day of the order"
    parameters = {"type": "object", "properties": {"color": {"type": "string"}, "size": {"type": "integer"}}}
    return {"type": "function", "function": {"name": f"find_{thing}", "description": text, "parameters": parameters}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    with started(home, Options(reuse="learned"), CONTEXT) as found:
        yield found


def learned(served: Served) -> LearnedBlocks:
    found = served.scheduler.state.learned
    assert found is not None
    return found


def wait(served: Served) -> None:
    """Wait until all that was asked is learned."""
    deadline = time.monotonic() + 60
    while served.at_context(lambda: bool(served.scheduler.idle_work and served.scheduler.idle_work.busy)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(served: Served, things: Sequence[str], status: str = "clean", question: str = "Why?", **more: Any) -> Json:
    """Return the counts of a prompt with these parts, and where its K/V is from."""
    system = "\n\n".join([f"Git status: {status}.", *map(part, things)])
    notes = {"explain": True, **more.pop("notes", {})}
    talk = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    reply = served.chat(talk, notes=notes, max_tokens=4, temperature=0, **more)
    near = [piece for piece in reply["notes"]["pieces"] if piece["reason"] == "near"]
    spared = sum(piece["tokens"] for piece in near)
    return {**reply["notes"]["counts"], "near": spared, "why": " ".join(piece["why"] for piece in near)}


def test_a_text_after_another_line(served: Served) -> None:
    assert ask(served, THINGS[:4])["near"] == 0
    wait(served)
    again = ask(served, THINGS[:4], "dirty")
    assert again["decoded"] < 0.3 * again["total"] and "learned-" in again["why"]
    exact = ask(served, THINGS[:4], "dirty, too", notes={"reuse": "exact"})
    assert exact["near"] == 0 and exact["decoded"] > 0.8 * exact["total"]


def test_a_system_text_without_its_tools(served: Served) -> None:
    """As in a compaction: what ends the list of tools before it is no part of it."""
    system = {"role": "system", "content": "\n\n".join(map(part, THINGS[:4]))}
    talk = [system, {"role": "user", "content": "Why?"}]
    served.chat(talk, tools=list(map(tool, THINGS[:3])), max_tokens=2)
    wait(served)
    found = served.chat(talk, notes={"explain": True}, max_tokens=2)["notes"]["counts"]
    assert found["decoded"] < 0.3 * found["total"]


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("Today is day {}.", True),
        ("Git status:\nM the file {} of a\n" + "\n".join(f"M the file {n}" for n in "abcdefghijkl"), True),
        ("current date: 2026-11-{}", True),
        ("Working directory: /home/me/{}", True),
        ("Delivery date: 2026-11-{}", False),
        ("The fee is {} dollars.", False),
    ],
)
def test_a_text_around_a_line_that_changes(served: Served, line: str, left_out: bool) -> None:
    """A paragraph about the present is left out of the learned text. Behind any other paragraph that changes, the
    text is decoded: its K/V may hold a conclusion from it."""
    talk = [part("chair", 9), part("table", 9), line, part("lamp", 9), part("shelf", 9)]

    def reused(number: int) -> float:
        system = "\n\n".join(talk).format(number)
        messages = [
            {"role": "system", "content": f"Today is day {number}.\n\n{system}"},
            {"role": "user", "content": "Why?"},
        ]
        reply = served.chat(messages, notes={"explain": True}, max_tokens=2)
        wait(served)
        return 1 - float(reply["notes"]["counts"]["decoded"] / reply["notes"]["counts"]["total"])

    assert reused(11) == 0
    found = [reused(number) for number in (12, 13)]
    assert min(found) > 0.7 if left_out else min(found) > 0.3 and max(found) < 0.6


def test_no_value_behind_a_changed_one(served: Served) -> None:
    """Its K/V may hold a conclusion from the old value: it is decoded, as far as the text is one."""
    things = [part(thing, 9) for thing in THINGS[:4]]
    ask(served, (), question="\n\n".join(things))
    wait(served)
    for number, thing in enumerate(things):
        changed = [*things[:number], thing.replace("within 65 days", "within 70 days"), *things[number + 1 :]]
        found = ask(served, (), "dirty", question="Look.\n\n" + "\n\n".join(changed))
        whole = sum(len(served.scheduler.workspace.model.tokenize(text)) for text in things)
        assert found["near"] <= (number + 0.6) / 4 * whole
        served.at_context(served.scheduler.prefixes.close)


def test_a_set_of_tools_is_one_block_and_single_tools_are_for_others(served: Served) -> None:
    """Also around a tool that comes. What was computed after a tool that leaves is not placed."""
    names = sorted(THINGS[:6])
    tools = dict(zip(names, map(tool, names), strict=True))
    new = tools.pop(names[2])
    ask(served, (), tools=list(tools.values()))
    wait(served)
    served.scheduler._begin_idle = lambda: False  # type: ignore[method-assign]
    model = served.scheduler.workspace.model
    texts = {block.name: model.text(block.tokens) for block in learned(served)._blocks[""]}

    def placed(*tools: Json) -> list[int]:
        """Return the number of tools in each block that is placed, as nothing is cached."""
        served.at_context(served.scheduler.prefixes.close)
        found = ask(served, (), f"{len(tools)} files", tools=list(tools))
        assert found["near"] > 0.3 * found["total"]
        return [texts[name].count("Look for") for name in re.findall(r"learned-\w+", found["why"])]

    assert placed(*tools.values()) == [5]
    assert placed(*tools.values(), new) == [5, 5]
    assert placed(*list(tools.values())[1:]) == [1, 1, 1, 1]
    assert placed(*list(tools.values())[:3], new) == [5, 5]


def test_a_text_below_another_version_of_it_is_decoded(served: Served) -> None:
    """In an earlier message or the same one. Below another text, it is placed."""
    old, new = part("sofa", 20), part("sofa", 20).replace("within 65 days", "within 70 days")
    for text in (old, new):
        for status in ("one", "two"):
            ask(served, (), status, question=text)
    wait(served)
    for above, share in ((old, 0.4), (part("lamp", 20), 0.4), ("", 0.6)):
        found = ask(served, (), "three", question=f"{above}\n\n{new}")
        assert (found["near"] > share * found["total"]) is (above != old), above


@pytest.mark.parametrize("restart", [False, True])
def test_a_question_is_learned_the_second_time_and_stays_in_memory(home: Path, restart: bool) -> None:
    """System texts are in files, and there after a restart; what a user writes is not."""
    question = part("sofa", 8)
    with started(home, Options(reuse="learned"), CONTEXT) as served:
        ask(served, THINGS[:2], question=question)
        ask(served, THINGS[:2], "dirty", question=question)
        wait(served)
        if not restart:
            assert ask(served, (), "new", question=f"Look:\n\n{question}")["near"] > 0
            return
    with started(home, Options(reuse="learned"), CONTEXT) as served:
        assert ask(served, THINGS[:2], "new")["near"] > 0
        assert ask(served, (), "newer", question=f"Look:\n\n{question}")["near"] == 0
    texts = b"".join(path.read_bytes() for path in (home / "library" / LEARNED).glob("*.gguf"))
    assert b"every chair" in texts and b"every sofa" not in texts


ONE_TURN = """{%- set ns = namespace(system='') -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- else -%}
{{- OPEN + m.role + '\n' + ns.system + m.content + CLOSE + '\n' -}}{%- set ns.system = '' -%}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- OPEN + 'assistant\n' -}}{%- endif -%}"""


@pytest.mark.parametrize(("opening", "closing"), [("<|im_start|>", "<|im_end|>"), ("### ", "")])
def test_what_a_user_writes_is_in_no_file_if_it_is_in_one_message_with_the_system_text(
    home: Path, opening: str, closing: str
) -> None:
    template = ONE_TURN.replace("OPEN", f"'{opening}'").replace("CLOSE", f"'{closing}'")
    with started(home, Options(reuse="learned"), CONTEXT, chat_template=template) as served:
        ask(served, THINGS[:2], question=part("sofa", 20))
        wait(served)
        assert learned(served)._blocks
    assert not (home / "library" / LEARNED).exists()


def test_calls_and_objects_of_a_user_are_in_no_file(home: Path, served: Served) -> None:
    """Though they have the name of a tool."""
    own = json.dumps({"name": "find_chair", "parameters": {"secret": part("sofa", 20)}})
    call = {"id": "1", "type": "function", "function": {"name": "find_chair", "arguments": json.dumps({"color": own})}}
    messages = [
        {"role": "system", "content": part("lamp")},
        {"role": "user", "content": f"Look at this:\n\n{own}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{own}\n"},
        {"role": "user", "content": "And now?"},
    ]
    served.chat(messages, tools=[tool("chair")], max_tokens=2)
    wait(served)
    texts = b"".join(path.read_bytes() for path in (home / "library" / LEARNED).glob("*.gguf"))
    assert b"every lamp" in texts and b"Look for a chair" in texts and b"sofa" not in texts
    assert any(b"sofa" in block.segment.text.encode() for block in learned(served)._blocks[""] if block.segment)


def test_a_failure_is_forgotten_and_the_server_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = served.at_context(lambda: served.scheduler.workspace.context.n_free)
    monkeypatch.setattr(LearnedBlocks, "_keep", lambda *_: 1 / 0)
    ask(served, THINGS[:3])
    wait(served)
    assert "a text was not learned: division by zero" in capsys.readouterr().err
    monkeypatch.setattr(LearnedBlocks, "_find", lambda *_: 1 / 0)
    ask(served, THINGS[:4])
    wait_for = time.monotonic() + 10
    while "nothing is learned" not in capsys.readouterr().err:
        assert time.monotonic() < wait_for
        time.sleep(0.01)
    assert served.at_context(lambda: served.scheduler.workspace.context.n_free) >= free - 2
    assert ask(served, THINGS[:5])["decoded"]


def test_salts_have_blocks_of_their_own(home: Path, served: Served) -> None:
    ask(served, THINGS[:3], notes={"cache_salt": "one"})
    wait(served)
    assert ask(served, THINGS[:3], "dirty", notes={"cache_salt": "two"})["near"] == 0
    assert ask(served, THINGS[:3], "dirty")["near"] == 0
    assert ask(served, THINGS[:3], "dirty", notes={"cache_salt": "one"})["near"] > 0
    wait(served)
    names = {block.name for block in learned(served)._blocks["one"]}
    files = {path.name.split(".")[0] for path in (home / "library" / LEARNED).glob("*.gguf")}
    assert names and files and all(block.path is None for block in learned(served)._blocks["one"])


@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_block_whose_file_is_lost_is_decoded(
    home: Path, served: Served, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm --learned` removes what the server has open, too."""
    monkeypatch.setenv("NOTES_HOME", str(home))
    ask(served, THINGS[:3])
    wait(served)
    assert ask(served, THINGS[:3], "open")["near"] > 0
    files = list((home / "library" / LEARNED).glob("*.gguf"))
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert run_here("ls", "--learned", "-q").out.split() == [path.name.split(".")[0] for path in sorted(files)]
    if harm == "removed":
        assert run_here("rm", "--learned").code == 2 and files[0].exists()
        assert run_here("rm", "--learned", "-y").code == 0 and not any(path.exists() for path in files)
    for path in files if harm == "damaged" else ():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[:-64] + bytes(64))
    found = ask(served, THINGS[:3], "dirty")
    assert found["near"] == 0 and found["decoded"] > 0.8 * found["total"]


@pytest.mark.parametrize("batches", [None, 1])
def test_a_block_has_the_rows_of_a_compiled_text(served: Served, batches: int | None) -> None:
    """Also if its job is cancelled after each batch, and the next one continues."""
    served.scheduler._begin_idle = lambda: False  # type: ignore[method-assign]
    ask(served, THINGS[:2])
    found, workspace, lengths = learned(served), served.scheduler.workspace, list[int]()

    def compute() -> Segment:
        while (job := found.job(ROOM)) is not None:
            block = max(found._waiting.values(), key=lambda one: (one.of_system, one.prompts, len(one.tokens)))
            job.sequence = workspace.sequence()
            task = job.task(job)
            for _ in zip(range(batches or ROOM), task, strict=False):
                decode([job.sequence], 32)
            task.close()
            while found.writing:
                time.sleep(0.001)
            lengths.append(len(block.segment or ()))
        segment = found._opened(found._blocks[""][0])
        assert segment is not None
        return replace(segment, layers=tuple(segment.layers))

    segment = served.at_context(compute)
    skill = Skill("same", "", workspace.model.text(segment.tokens), (), "-")
    wanted = served.at_context(lambda: compile_skill(workspace, skill))
    assert np.array_equal(segment.tokens, wanted.tokens) and segment.base == wanted.base
    assert max(lengths, default=0) > 0 if batches else len(lengths) == len(found._blocks[""])
    for ours, theirs in zip(segment.layers, wanted.layers, strict=True):
        assert nmse(ours.k, theirs.k) < 1e-5 and nmse(ours.v, theirs.v) < 1e-5


def test_a_request_ends_the_job_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, submit = list[bool](), served.scheduler.scheduler.submit

    def submitted(job: Job[Any]) -> None:
        if job.stop:
            job.on_end = lambda job: ended.append(job.dropped)
        submit(job)

    monkeypatch.setattr(served.scheduler.scheduler, "submit", submitted)
    ask(served, (), question=part("sofa", 40))
    for number in range(5):
        ask(served, (), question=f"Question {number}?")
    wait(served)
    assert ended.count(True) >= 1 and not ended[-1] and learned(served)._blocks[""]


def test_memory_stays_in_its_budget_and_the_least_useful_goes_first(served: Served) -> None:
    found, salt = learned(served), {"cache_salt": "one"}
    for number, thing in enumerate(THINGS):
        ask(served, (), question=part(thing, 20), notes=salt)
        wait(served)
        held = sum(block.nbytes for block in found._blocks["one"])
        if not number:
            found._budget = 3 * held + 1
        assert 0 < held <= found._budget
        if thing == "table":
            assert ask(served, (), "dirty", question=f"Look:\n\n{part(thing, 20)}", notes=salt)["near"] > 0
    texts = " ".join(served.scheduler.workspace.model.text(block.tokens) for block in found._blocks["one"])
    assert [thing for thing in THINGS if f"every {thing}" in texts] == ["table", "desk", "bench"]


def test_blocks_are_whole_and_apart_and_leave_out_what_changes(served: Served) -> None:
    model, choose = served.scheduler.workspace.model, Random(5)
    words = [*THINGS, "\n", "\n\n", "# ", "{", "}", '{"type":"function"', '{"name":"a","b":"c d e f"}', " the ", " 7 "]

    def messages(text: str) -> list[tuple[Paragraphs, Objects]]:
        pieces = [model.token_bytes(int(token)) for token in model.tokenize(text)]
        return list(messages_of(pieces, 0, len(pieces)))

    for _ in range(50):
        text = "".join([*choose.choices(words, k=300), f"\n\n{part('sofa')}\n\n", *choose.choices(words, k=300)])
        tokens = model.tokenize(text)
        blocks = [block for message in messages(text) for block in blocks_of(*message)]
        for sets in (True, False):
            spans = sorted(part for items, parts in blocks if (len(items) > 1) is sets for part in parts)
            assert all(0 <= first < last <= len(tokens) for first, last in spans)
            assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_parts_are_placed_only_after_all_parts_before_them(served: Served) -> None:
    """Whatever is between them, against all orders of parts with damages."""
    model, choose = served.scheduler.workspace.model, Random(7)
    texts = [model.tokenize(f"\n\n{part(thing)}") for thing in THINGS[:4]]
    begins = tuple(accumulate(map(len, texts[:-1]), initial=0))
    index = TextIndex(model, [Texts(np.concatenate(texts), begins, chained=True)])
    for _ in range(200):
        order = [choose.randrange(4) for _ in range(6)]
        whole = [choose.random() < 0.7 for _ in order]
        prompt: list[Tokens] = []
        for number, intact in zip(order, whole, strict=True):
            cut = choose.randrange(len(texts[number]))
            other = model.tokenize(f" But the {choose.choice(THINGS)} is gone.")
            prompt += [texts[number]] if intact else [texts[number][:cut], other, texts[number][cut:]]
            prompt += [other] if choose.random() < 0.3 else []
        tokens = np.concatenate(prompt)
        for run in index.runs(tokens, [(0, len(tokens))]):
            ours = np.concatenate(texts)[run.start : run.start + len(run)]
            assert np.array_equal(ours, tokens[run.first : run.last])
            before = tokens[: run.first].tobytes()
            for number in range(sum(begin <= run.start for begin in begins) - 1):
                assert texts[number][3:].tobytes() in before


def test_nothing_is_learned_where_it_is_off(home: Path) -> None:
    with started(home, Options(reuse="compiled"), CONTEXT) as served:
        ask(served, THINGS[:3])
        assert served.scheduler.state.learned is None
        assert ask(served, THINGS[:3], "dirty")["near"] == 0
    assert not (home / "library" / LEARNED).exists()
