"""Tests global errata: each conversation with the skill gets one, once, before its next question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notes_cli.cli import run
from notes_cli.engine.model import Model
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, now
from notes_cli.serve import conversations
from notes_cli.sessions import session

from .conftest import QUESTION, Json, Served, compile_into, pieces, reply_text, started
from .test_robust import wait

TIER = {"role": "user", "content": "What is the tier?"}
ASK = {"role": "user", "content": QUESTION}
NOTES = {"splice": ["returns"], "explain": True}
LATE = {"field": "date", "value": "2026-07-01"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with its own library and sessions, which the command line shares."""
    monkeypatch.setenv("NOTES_HOME", str(tmp_path))
    monkeypatch.setenv("NOTES_THREADS", "1")
    compile_into(tmp_path, "returns", "support")
    with started(tmp_path) as found:
        yield found


def turn(served: Served, talk: list[Json], question: Json, **notes: Any) -> Json:
    """Ask the next turn of a conversation, and append it to `talk`."""
    talk.append(question)
    reply = served.chat(talk, notes={**NOTES, **notes})
    talk.append({"role": "assistant", "content": reply_text(reply)})
    return reply


def standing_of(served: Served) -> Json:
    return {one["name"]: one["standing"] for one in served.http.get("/v1/notes").json()["skills"]}


def errata(reply: Json) -> int:
    return sum(kind == "erratum" for kind, _, _ in pieces(reply))


def test_said_to_live_conversations_once(own: Served) -> None:
    """Before the next question, with its prefix; new ones get it with the skill; a revoked value counts as new."""
    talk: list[Json] = []
    other: list[Json] = []
    assert reply_text(turn(own, talk, ASK)) == "accepted"
    turn(own, other, {"role": "user", "content": "What is the plan?"}, splice=["support"])
    done = own.http.post("/v1/notes/errata", json=LATE).json()
    assert (done["conversations"], done["errata"][0]["skill"], done["errata"][0]["was"]) == (1, "returns", "2026-05-01")
    assert standing_of(own) == {"returns": {"date": "2026-07-01"}, "support": {}}
    second = turn(own, talk, ASK)
    assert reply_text(second) == "refused" and errata(second) == 1
    live = sum(tokens for _, how, tokens in pieces(second) if how == "live")
    assert second["usage"]["prompt_tokens"] - live < 60, "only what is new is decoded"
    third = turn(own, talk, ASK)
    assert reply_text(third) == "refused" and errata(third) == 1
    assert [one[:2] for one in pieces(third)].count(("erratum", "live")) == 1
    assert errata(turn(own, other, {"role": "user", "content": "What is the season?"}, splice=["support"])) == 0
    new = own.chat([ASK], notes=NOTES)
    assert reply_text(new) == "refused" and errata(new) == 1
    assert own.http.post("/v1/notes/errata", json={"field": "date", "value": "2026-05-01"}).json()["conversations"] == 2
    assert standing_of(own)["returns"] == {}
    assert reply_text(turn(own, talk, ASK)) == "accepted"
    assert (reply_text(again := own.chat([ASK], notes=NOTES)), errata(again)) == ("accepted", 0)


def test_a_matched_text_is_corrected(own: Served) -> None:
    """A skill's text from a client without `notes` is spliced in place, and corrected."""
    text = own.http.get("/v1/notes/returns").json()["text"]
    system = {"role": "system", "content": f"You work for Harbor Books.\n\n{text}\n\nBe brief."}
    reply = own.chat([system, ASK], notes={"explain": True})
    tokens = own.http.get("/v1/notes/returns").json()["tokens"]
    assert ("splice", "spliced", tokens - 1) in pieces(reply) and reply_text(reply) == "accepted"
    plain = own.chat([system, ASK], notes={"explain": True, "match": False})
    assert {how for _, how, _ in pieces(plain)} <= {"decoded", "live"} and reply_text(plain) == "accepted"
    own.http.post("/v1/notes/errata", json=LATE)
    assert reply_text(own.chat([system, ASK])) == "refused"


def test_a_client_corrects_its_own(own: Served) -> None:
    talk: list[Json] = []
    assert reply_text(turn(own, talk, ASK)) == "accepted"
    second = turn(own, talk, ASK, errata={"date": "2026-07-01"})
    third = turn(own, talk, ASK, fields={"date": "2026-07-01"})
    assert reply_text(second) == reply_text(third) == "refused" and errata(third) == 1
    live = sum(tokens for _, how, tokens in pieces(third) if how == "live")
    assert live >= second["usage"]["prompt_tokens"]
    assert reply_text(turn(own, talk, ASK, errata={"date": "2026-05-02"})) == "accepted"
    again = turn(own, talk, ASK, errata={"date": "2026-07-01"})
    assert reply_text(again) == "refused", "given again after another value"


def test_each_of_many_clients_keeps_its_own_correction(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more clients of equal messages and answers than are remembered."""
    monkeypatch.setattr(conversations, "ALIKE", 4)
    dates = [f"2026-07-{day:02}" for day in range(1, 7)]
    for date in dates:
        assert reply_text(own.chat([ASK], notes={**NOTES, "errata": {"date": date}})) == "refused"
    talk = [ASK, {"role": "assistant", "content": "refused"}, {"role": "user", "content": f"{QUESTION} Think first."}]
    for date in dates:
        reply = own.chat(talk, notes={**NOTES, "errata": {"date": date}})
        assert reply_text(reply) == f"The date is {date}. So the return is refused."


@pytest.mark.parametrize(
    ("first", "everybody"), [("named", False), ("system", True), ("question", False), ("both", True), ("named", True)]
)
def test_a_text_that_comes_again_overrules_no_correction(own: Served, first: str, everybody: bool) -> None:
    """With a document in each question, each copy is spliced, and errata follow the last one."""
    text = own.http.get("/v1/notes/returns").json()["text"]
    with_text = {"role": "user", "content": f"{text}\n\n{QUESTION}"}
    late = {} if everybody else {"errata": {"date": "2026-07-01"}}
    if everybody:
        assert own.http.post("/v1/notes/errata", json=LATE).status_code == 200
    notes = {"splice": ["returns"] if first in ("named", "both") else [], "explain": True, **late}
    talk: list[Json] = [{"role": "system", "content": text}] if first in ("system", "both") else []
    for number in range(3):
        talk.append(with_text if number or first != "named" else ASK)
        reply = own.chat(talk, notes=notes)
        kinds = [kind for kind, _, _ in pieces(reply) if kind in ("splice", "erratum")]
        assert (reply_text(reply), kinds[-1]) == ("refused", "erratum"), kinds
        assert max(tokens for _, how, tokens in pieces(reply) if how == "decoded") < 40, "no copy is decoded"
        assert reply_text(own.chat(talk, notes={**notes, "recompute": True})) == "refused"
        if notes["splice"]:  # with a salt nothing else is matched
            salted = own.chat(talk, notes={**notes, "cache_salt": "alone"})
            assert reply_text(salted) == "refused"
            assert max(tokens for _, how, tokens in pieces(salted) if how == "decoded") < 40
        talk.append({"role": "assistant", "content": reply_text(reply)})


def test_what_is_live_is_told_by_its_own_prompt(own: Served) -> None:
    """The blank line before an erratum is cached from another request, and is followed by other text here."""
    text = own.http.get("/v1/notes/returns").json()["text"]
    late = {"explain": True, "errata": {"date": "2026-07-01"}}
    first = own.chat([{"role": "system", "content": text}, ASK], notes=late)
    second = own.chat([{"role": "system", "content": f"{text}\n\nBe kind."}, ASK], notes={"explain": True})
    live = [sum(tokens for _, how, tokens in pieces(one) if how == "live") for one in (first, second)]
    skill = sum(tokens for kind, _, tokens in pieces(first) if kind == "splice")
    assert (errata(first), errata(second)) == (1, 0) and live[1] > skill, "something after the skill is shared"


def compiled(own: Served, name: str, text: str) -> None:
    assert own.http.post("/v1/notes/compile", json={"name": name, "text": text, "force": True}).status_code == 200


def asked_with(text: str, question: str = QUESTION) -> Json:
    return {"role": "user", "content": f"{text}\n\n{question}"}


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_newer_text_that_is_only_quoted_is_no_copy(own: Served, role: str) -> None:
    """In a fence or an answer it does not match: the conversation keeps its text and its prefix."""
    text = own.http.get("/v1/notes/returns").json()["text"]
    newer = text.replace("amount: 120", "amount: 121")
    talk: list[Json] = []
    turn(own, talk, ASK)
    compiled(own, "returns", newer)
    quoted = [ASK, {"role": role, "content": newer}] if role == "assistant" else []
    reply = own.chat([*talk, *quoted, asked_with(f"```\n{newer}\n```")], notes=NOTES)
    assert [how for kind, how, _ in pieces(reply) if kind == "splice"] == ["live"]


def test_free_words_are_said_again_after_a_text_that_comes_again(own: Served) -> None:
    """An erratum without a field may be about any skill, so it is repeated. A short text with a field is found, too."""
    text = own.http.get("/v1/notes/returns").json()["text"]
    notes = {"errata": ["The date is now 2026-07-01. This replaces the earlier date."]}
    talk: list[Json] = []
    for _ in range(2):
        talk.append(asked_with(text))
        assert reply_text(own.chat(talk, notes=notes)) == "refused"
        talk.append({"role": "assistant", "content": "refused"})
    fee = "# Fee\n\ntier: gold\n\nThe fee is due."
    compiled(own, "fee", fee)
    assert own.http.post("/v1/notes/errata", json={"field": "fee.tier", "value": "silver"}).status_code == 200
    assert errata(own.chat([asked_with(fee, "What is the tier?")], notes={"explain": True})) == 1


@pytest.mark.parametrize("then", [{"date": "2026-05-02"}, {}])
def test_a_conversation_keeps_its_skills_whatever_it_corrects(own: Served, then: Json) -> None:
    """A skill that was removed since, with another erratum than at the first turn, or none."""
    talk: list[Json] = []
    assert reply_text(turn(own, talk, ASK, errata={"date": "2026-07-01"})) == "refused"
    assert own.http.delete("/v1/notes/returns").status_code == 200
    assert reply_text(turn(own, talk, ASK, errata=then)) == "accepted"


def test_a_correction_by_the_command_line_reaches_sessions_and_chats(own: Served) -> None:
    """The server and the command line share sessions on disk, and `notes edit --all` edits all of them."""
    ours = {**NOTES, "session": "ours"}
    assert reply_text(own.chat([ASK], notes=ours)) == reply_text(own.chat([ASK], notes=NOTES)) == "accepted"
    assert run(["edit", "--all", "--field", "date=2026-07-01"]) == 0
    again = own.chat([ASK], notes={"session": "ours"})
    assert reply_text(again) == reply_text(own.chat([ASK], notes=NOTES)) == "refused"
    [listed] = own.http.get("/v1/notes/sessions").json()["sessions"]
    assert (listed["name"], listed["fields"]["date"]) == ("ours", "2026-07-01")


def test_an_edited_text_is_told_in_the_log(
    own: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each edit: clients keep the compiled text, and the operator can recompile it."""
    text = tmp_path / "edited.txt"
    text.write_text("plan: basic\n\n- If the plan is basic then the support is slow.\n")
    monkeypatch.setattr("sys.stdin", None)
    assert run(["compile", str(text)]) == 0
    for count, plan in enumerate(("basic", "basic", "team", "family")):
        text.write_text(f"plan: {plan}\n\n- If the plan is basic then the support is slow.\n")
        for _ in range(2):
            assert own.ask("What is the plan?", splice=["edited"])["choices"]
        warnings = capsys.readouterr().err.count("warning: edited: the text has changed")
        assert warnings == (1 if count > 1 else 0), plan


def test_what_nobody_can_be_told(own: Served) -> None:
    unknown: list[Json] = [{"field": "colour", "value": "red"}, {"field": "date"}, {"value": "x"}, {**LATE, "x": 1}]
    for given in (*unknown, {**LATE, "value": "2026\0"}, {**LATE, "value": "a\x1b[31mb"}):
        assert own.http.post("/v1/notes/errata", json=given).status_code == 400, given
    assert not (own.home / "library" / "errata.jsonl").exists()


def test_the_file_survives_a_torn_line(tmp_path: Path) -> None:
    """A torn line from a crash is overwritten; another process's lines are read."""
    first, second = GlobalErrata(tmp_path / "library"), GlobalErrata(tmp_path / "library")
    first.add([GlobalErratum("returns", "date", "a", "b", now())])
    with first.path.open("ab") as file:
        file.write(b'{"skill": "ret')
    assert [one.value for one in second.all()] == ["b"]
    second.add([GlobalErratum("returns", "date", "a", "c", now())])
    assert [one.value for one in first.all()] == ["b", "c"] and oct(first.path.stat().st_mode)[-3:] == "600"


def test_a_stopped_answer_has_been_told(own: Served) -> None:
    """The errata are in the prompt: the conversation continues from the partial answer, and from its prefix."""
    talk: list[Json] = []
    assert reply_text(turn(own, talk, ASK)) == "accepted"
    talk.append({"role": "user", "content": f"{QUESTION} Think first."})
    notes = {**NOTES, "errata": {"date": "2026-07-01"}}
    received = ""
    with own.client.chat.completions.create(
        model="", messages=talk, stream=True, extra_body={"notes": notes}
    ) as chunks:
        for chunk in chunks:
            received += chunk.choices[0].delta.content or ""
            if len(received) > 3:
                break
    wait(lambda: own.scheduler.load == 0)
    talk.append({"role": "assistant", "content": received})
    reply = turn(own, talk, ASK, errata={"date": "2026-07-01"})
    assert reply_text(reply) == "refused" and [one[:2] for one in pieces(reply)].count(("erratum", "live")) == 1


def test_others_are_answered_while_sessions_are_told(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are edited between steps, and all running answers get a token between two of them."""
    for number in range(4):
        own.chat([ASK], notes={**NOTES, "session": f"s{number}"})
    steps: list[int] = []
    real = session.apply_errata

    def tell(*given: Any) -> int:
        steps.append(own.scheduler.metrics.steps)
        return real(*given)

    monkeypatch.setattr(session, "apply_errata", tell)
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    with own.client.completions.create(model="", prompt="x", max_tokens=1000, stream=True) as chunks:
        next(iter(chunks))
        done = own.http.post("/v1/notes/errata", json=LATE).json()
    assert done["sessions"] == ["s0", "s1", "s2", "s3"] and len(set(steps)) == 4


def test_a_first_turn_is_corrected_in_place_too(own: Served) -> None:
    """As in `notes ask`: the value's own K/V and one erratum after the skill. Other requests reuse neither."""
    given = {"errata": ["date=2026-07-01", "date=2026-05-02", "date=2026-07-01"]}
    talk: list[Json] = []
    first = turn(own, talk, ASK, **given)
    assert reply_text(first) == "refused" and errata(first) == 1
    assert first["notes"]["counts"]["rewritten"] > 0
    kinds = [kind for kind, _, _ in pieces(first)]
    assert kinds[-2:] == ["erratum", "question"] and kinds[-3] == "splice", "directly after the skill"
    again = turn(own, talk, ASK, **given)
    assert reply_text(again) == "refused" and {how for kind, how, _ in pieces(again) if kind == "splice"} == {"live"}
    for other, answer in (("2026-05-02", "accepted"), ("2026-08-01", "refused")):
        reply = own.chat([ASK], notes={**NOTES, "errata": {"date": other}})
        assert reply_text(reply) == answer and "spliced" in {how for kind, how, _ in pieces(reply) if kind == "splice"}
    assert reply_text(plain := own.chat([ASK], notes=NOTES)) == "accepted"
    assert plain["notes"]["counts"]["rewritten"] == 0
    own.http.post("/v1/notes/errata", json=LATE)
    everybody = own.chat([ASK], notes=NOTES)
    counts = [one["notes"]["counts"]["total"] for one in (everybody, first)]
    assert reply_text(everybody) == "refused" and counts[0] == counts[1]


def test_exact_chats_are_corrected_by_errata_alone(served: Served) -> None:
    """An exact prompt has no K/V that was computed with the old value; other texts are decoded with the new one."""
    exact = served.chat([ASK], notes={**NOTES, "errata": {"date": "2026-07-01"}, "exact": True})
    assert (reply_text(exact), errata(exact), exact["notes"]["counts"]["rewritten"]) == ("refused", 1, 0)
    whole = served.chat([ASK], notes={**NOTES, "errata": {"date": "2026-07-01"}, "recompute": True})
    spliced = served.chat([ASK], notes={**NOTES, "errata": {"date": "2026-07-01"}, "cache_salt": "other"})
    assert reply_text(whole) == reply_text(spliced) == "refused"
    assert whole["notes"]["counts"]["total"] == spliced["notes"]["counts"]["total"]


def test_a_value_named_by_its_text(own: Served) -> None:
    """Of a field or not, in each turn, where the conversation is found again; a text that is nowhere is a 400."""
    talk: list[Json] = []
    named = ["2026-05-01 => 2026-07-01", "over 500 => over 100"]
    assert reply_text(turn(own, talk, ASK, errata=named)) == "refused"
    second = turn(own, talk, ASK, errata=named)
    assert reply_text(second) == "refused" and errata(second) == 2
    assert any(how == "live" for _, how, _ in pieces(second))
    body = {"messages": [ASK], "notes": {"splice": ["returns"], "errata": ["over 600 => over 100"]}}
    refused = own.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "The lines that come near: returns line 11" in refused.text
