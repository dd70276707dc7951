"""Tests the library over HTTP: list, compile with progress, remove; skills in use are not affected."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import QUESTION, Json, Served, pieces, reply_text, started

TEXT = "# Returns policy of Harbor Books\n\ndate: 2026-05-01\ntier: gold\namount: 120\n\n" + (
    "- If the date is before 2026-06-15 then the return is accepted, otherwise the return is refused.\n"
    "- If the tier is gold then the shipping is free.\n"
)


def events(served: Served, path: str, data: Json) -> list[Json]:
    reply = served.http.post(path, json=data)
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]


def test_a_skill_is_compiled_listed_used_and_removed(own: Served) -> None:
    *progress, last = events(own, "/v1/notes/compile", {"name": "short", "text": TEXT})
    assert progress[-1]["done"] == progress[-1]["total"] > 50 and last["skill"]["name"] == "short"
    (listed,) = [one for one in own.http.get("/v1/notes").json()["skills"] if one["name"] == "short"]
    assert listed["model_matches"] and listed["fields"]["date"] == "2026-05-01" and listed["tokens"] > 50
    shown = own.http.get("/v1/notes/short").json()
    assert shown["text"] == TEXT.strip()
    assert {shown["text"][one["start"] : one["end"]] for one in shown["spans"]} == {"2026-05-01", "gold", "120"}
    assert reply_text(own.ask(splice=["short"])) == "accepted"
    assert events(own, "/v1/notes/compile", {"name": "short", "text": TEXT})[-1]["skill"]["reasons"] == []
    other = {"name": "short", "text": TEXT.replace("gold", "basic")}
    taken = own.http.post("/v1/notes/compile", json=other)
    assert taken.status_code == 409 and taken.json()["error"]["code"] == "name_taken"
    assert "another skill short already, from no file (it was sent" in taken.json()["error"]["message"]
    assert events(own, "/v1/notes/compile", {**other, "force": True})[-1]["skill"]["fields"]["tier"] == "basic"
    assert own.http.delete("/v1/notes/short").json() == {"name": "short", "deleted": True}
    for name in ("short", "nothing-near", "no name", "x" * 5000):
        reply = own.http.delete(f"/v1/notes/skills/{name}")
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "skill_not_found"
    gone = own.chat([{"role": "user", "content": QUESTION}], 404, notes={"splice": ["short"]})
    assert gone["code"] == "skill_not_found"


def test_answers_go_on_while_a_text_is_compiled(own: Served) -> None:
    """A long compile yields to the steps of others."""
    seen: list[int] = []
    steps = own.scheduler.metrics.steps
    long = TEXT + "\n".join(f"- Rule {number}: the shipping of {number} is free." for number in range(80))
    with own.http.stream("POST", "/v1/notes/compile", json={"name": "long", "text": long}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert reply_text(own.ask(splice=["returns"])) == "accepted"
        seen.append(own.scheduler.metrics.steps)
        rest = [json.loads(line[6:]) for line in lines if line]
    assert rest[-1]["skill"]["tokens"] > 500 and rest[0]["done"] < rest[0]["total"] and seen[0] > steps


def test_a_recompiled_skill_is_another_one(own: Served) -> None:
    """An earlier conversation keeps its text, even if it is removed; new ones get the new text."""
    new = own.http.get("/v1/notes/returns").json()["text"].replace("before 2026-06-15", "before 2026-01-15")
    assert "before 2026-01-15" in new
    talk = [{"role": "user", "content": "What is the tier?"}]
    first = own.chat(talk, notes={"splice": ["returns"]})
    talk += [{"role": "assistant", "content": reply_text(first)}, {"role": "user", "content": QUESTION}]
    events(own, "/v1/notes/compile", {"name": "returns", "text": new, "force": True})
    assert reply_text(own.ask(splice=["returns"])) == "refused"
    extra = {"splice": ["returns"], "explain": True}
    goes_on = own.chat(talk, notes=extra)
    assert reply_text(goes_on) == "accepted" and {how for _, how, _ in pieces(goes_on)} == {"live", "decoded"}
    assert own.http.delete("/v1/notes/returns").status_code == 200
    talk += [{"role": "assistant", "content": reply_text(goes_on)}, {"role": "user", "content": QUESTION}]
    assert reply_text(own.chat(talk, notes=extra)) == "accepted"
    own.chat([{"role": "user", "content": "What is the amount?"}], 404, notes=extra)


def test_names_as_commands_take_them(own: Served) -> None:
    """In any case, also of a skill that the conversation has; an unknown one is an error."""
    talk = [{"role": "user", "content": QUESTION}]
    named = ({"notes": {"splice": names}} for names in (["Returns"], ["returns", "RETURNS"]))
    first, *others = (own.chat(talk, **how) for how in (*named, {"model": "tiny@Returns"}))
    assert {one["usage"]["prompt_tokens"] for one in others} == {first["usage"]["prompt_tokens"]}
    assert own.http.delete("/v1/notes/returns").status_code == 200
    talk += [{"role": "assistant", "content": reply_text(first)}, {"role": "user", "content": "What is the tier?"}]
    assert reply_text(own.chat(talk, notes={"splice": ["Returns"]})) == "gold"
    for name in ("Returns", "returns"):
        error = own.chat(talk[2:], 404, notes={"splice": [name]})
        assert error["message"].startswith("no compiled skill 'returns'") and " file" not in error["message"]
        assert own.http.delete(f"/v1/notes/{name}").status_code == 404


def test_a_name_of_the_model_with_an_at(library: Path) -> None:
    """Skills can be appended to it, too."""
    with started(library, names=["tiny@home", "tiny"]) as served:
        talk = [{"role": "user", "content": QUESTION}]
        for name in ("tiny@home@returns", "tiny@returns"):
            assert served.chat(talk, model=name)["usage"]["prompt_tokens"] > 100
        assert served.chat(talk, model="tiny@home")["usage"]["prompt_tokens"] < 100
        assert "no compiled skill 'home'" in served.chat(talk, 404, model="other@home")["message"]


def test_explain(own: Served) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "notes": {"splice": ["returns"], "explain": True}}
    decoded = own.scheduler.metrics.decoded
    before = own.http.post("/v1/notes/explain", json=asked).json()
    assert own.scheduler.metrics.decoded == decoded
    assert own.http.post("/v1/chat/completions", json=asked).json()["notes"]["pieces"] == before["pieces"]
    again = own.http.post("/v1/notes/explain", json=asked).json()
    hows = [(piece["kind"], piece["how"]) for piece in again["pieces"]]
    assert hows == [("text", "live"), ("splice", "live"), ("question", "decoded")]


def test_a_skill_may_have_the_name_of_a_path(own: Served) -> None:
    """/v1/notes/skills has every skill, also one with the name of another path."""
    for name in ("sessions", "errata", "compile", "skills"):
        text = f"# {name}\n\nplan: basic\n\n- If the plan is basic then the support is slow."
        assert '"skill"' in own.http.post("/v1/notes/compile", json={"name": name, "text": text}).text
        assert own.http.get(f"/v1/notes/skills/{name}").json()["name"] == name
        assert own.http.delete(f"/v1/notes/skills/{name}").json()["deleted"] is True
    assert own.http.get("/v1/notes/sessions").json() == {"sessions": []}
    assert own.http.get("/v1/notes/skills").json() == own.http.get("/v1/notes").json()
