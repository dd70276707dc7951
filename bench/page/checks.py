"""Checks of the web page, each as a user acts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Route, expect

from bench.page.user import QUESTION, SMALLEST, WAIT, User

KEY = "secret"
TEXTS = {  # names of skills besides the samples
    "hostile": 'owner: Ann\n\n<img src=x onerror="document.title=1"><script>document.title=2</script> '
    "If the owner is Ann.\n",
    "beyond": "\U0001f4e6\U0001f4e6\n\ndate: 2026-05-01\n\n"  # each of them is two units of UTF-16
    "If the date is before 2026-06-15 then the return is accepted, otherwise the return is refused.\n",
}

HERE = Path(__file__).parent
CONTRAST, DROP, HALF = ((HERE / f"{name}.js").read_text(encoding="utf-8") for name in ("contrast", "drop", "half"))


Job = Callable[[User], None]


@dataclass(frozen=True)
class Check:
    """A job, and before which server and browser it is done."""

    what: str
    job: Job
    key: str = ""  # that the server wants
    scheme: str = "light"
    small: bool = False  # a phone


CHECKS: list[Check] = []


def check(what: str, **how: Any) -> Callable[[Job], Job]:
    def added(job: Job) -> Job:
        CHECKS.append(Check(what, job, **how))
        return job

    return added


def same(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r}, not {wanted!r}")


@check("ask: streamed, with the prompt as a strip whose widths are its tokens")
def asks(user: User) -> None:
    page = user.page
    page.get_by_label("returns").check()
    same(user.ask(), "accepted")
    expect(page.locator("#start")).to_be_hidden()
    strip = user.strip()
    same([kind for kind, _ in strip], ["decoded", "restored", "decoded"])
    widths = [box["width"] for one in user.turn.locator(".bar span").all() if (box := one.bounding_box())]
    decoded, total = sum(tokens for kind, tokens in strip if kind == "decoded"), sum(tokens for _, tokens in strip)
    for width, (_, tokens) in zip(widths, strip, strict=True):
        same(round(width / sum(widths) - tokens / total, 1), 0)
    cost = user.turn.locator(".cost").inner_text()
    same((cost.startswith(f"{decoded} of {total} tokens decoded in "), "ms" in cost), (True, True))
    expect(user.turn.get_by_text("full prefill")).to_be_visible()
    expect(user.turn.locator(".actions")).to_contain_text(re.compile(r"\d+ tokens?, [\d.]+ per second"))


@check("correct: the correction is an erratum in the prompt, shown as one, and undone")
def corrects(user: User) -> None:
    user.page.get_by_label("returns").check()
    user.page.get_by_label("System text").fill("Be brief.")
    user.ask()
    same([kind for kind, _ in user.strip()], ["decoded", "seam", "rotated", "decoded"])
    user.correct("date", "2026-07-01")
    expect(user.page.locator("#correction")).to_contain_text("returns.date = 2026-07-01")
    user.page.get_by_role("button", name="New conversation").click()
    same(user.ask(), "refused")
    same([kind for kind, _ in user.strip()].count("erratum"), 1)
    user.page.get_by_role("button", name="Undo").click()
    user.page.get_by_role("button", name="New conversation").click()
    expect(user.page.locator("#correction")).to_be_hidden()
    same(user.ask(), "accepted")


@check("correct several: what is typed in one field stays while another is corrected")
def drafts(user: User) -> None:
    page = user.page
    page.get_by_label("returns").check()
    page.get_by_label("date", exact=True).fill("2026-07-01")
    user.correct("tier", "silver")
    same(page.get_by_label("date", exact=True).input_value(), "2026-07-01")
    expect(page.locator("#correction")).to_have_text("Corrected in the next question: returns.tier = silver")
    page.get_by_role("button", name="Correct", exact=True).click()
    expect(page.locator("#correction")).to_contain_text("returns.date = 2026-07-01")
    page.get_by_role("button", name="Undo").first.click()
    same(page.get_by_label("date", exact=True).input_value(), "2026-05-01")


@check("correct everywhere: another conversation, which began before, is corrected, and the page shows how many are")
def everyone(user: User) -> None:
    page = user.page
    with page.context.expect_page() as opened:
        page.evaluate("open(location.href)")
    other = User(opened.value, user.server)
    for one, question, answer in ((user, QUESTION, "accepted"), (other, "What is the tier?", "gold")):
        one.page.get_by_label("returns").check()
        same(one.ask(question), answer)
    user.correct("date", "2026-07-01")
    page.get_by_role("button", name="Correct everywhere").click()
    expect(page.locator(".note")).to_have_text("Corrected in 2 live conversations, 0 sessions, and all new ones.")
    same(page.get_by_label("date", exact=True).input_value(), "2026-07-01")
    expect(page.locator("#correction")).to_be_hidden()
    same(user.ask(), "refused")
    same(other.ask(), "refused")
    same([kind for kind, _ in other.strip()].count("erratum"), 1)
    same(other.wrong + other.foreign, [])


@check("correct in a conversation: stated once, before the next question; undone, the old value is stated again")
def corrects_later(user: User) -> None:
    user.page.get_by_label("returns").check()
    same(user.ask(), "accepted")
    user.correct("date", "2026-07-01")
    same(user.ask(), "refused")
    same(user.ask(), "refused")
    expect(user.turn.locator(".correction")).to_be_hidden()
    same([kind for kind, _ in user.strip()].count("erratum"), 0)
    user.page.get_by_role("button", name="Undo").click()
    expect(user.page.locator("#correction")).to_contain_text("returns.date = 2026-05-01")
    same(user.ask(), "accepted")
    same([kind for kind, _ in user.strip()].count("erratum"), 1)


@check("a conversation: the next turn keeps the prompt before it; new ones begin from nothing")
def goes_on(user: User) -> None:
    user.page.get_by_label("support").check()
    user.ask("What is the plan?")
    same(user.ask("What is the support?"), "daily")
    same(user.strip()[0][0], "kept")
    same(user.page.locator(".turn").count(), 2)
    user.page.get_by_role("button", name="New conversation").click()
    same(user.page.locator(".turn").count(), 0)
    user.page.locator("#example").get_by_role("button", name="What is the plan?").click()  # of the skill that is picked
    expect(user.turn.locator(".answer")).to_have_text("family", timeout=WAIT)


@check("two skills: in the order in which they were picked")
def orders(user: User) -> None:
    for name in ("support", "returns"):
        user.page.get_by_label(name).check()
    user.ask()
    user.strip()
    names = [one for one in user.turn.locator(".numbers tbody td:nth-child(3)").all_inner_texts() if "skill" in one]
    same(list(dict.fromkeys(names)), ["skill support", "skill returns"])


@check("text: fields are marked where they are, also after characters beyond 16 bits; Escape closes it")
def texts(user: User) -> None:
    for name, marks in (("returns", 3), ("beyond", 1)):
        user.page.get_by_label(name, exact=True).check()
        dialog = user.open_text()
        expect(dialog.locator("mark")).to_have_count(marks)
        expect(dialog.locator("mark").first).to_have_text("2026-05-01")
        user.page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        user.page.get_by_label(name, exact=True).uncheck()


@check("an error: one line at the turn it belongs to, and the page goes on")
def errs(user: User) -> None:
    user.type_question("Why? " * 5000)
    expect(user.turn.get_by_role("alert")).to_contain_text("more than this model can read at once")
    same(user.turn.locator(".error").inner_text().count("\n"), 0)
    user.page.get_by_label("returns").check()
    edited = user.edit()
    expect(edited).to_have_value(("Why? " * 5000).strip())
    edited.fill(QUESTION)
    edited.press("Enter")
    expect(user.turn.locator(".answer")).to_have_text("accepted", timeout=WAIT)
    same(user.page.locator(".turn").count(), 1)
    user.wrong.clear()  # the browser logs each 400


@check("offline: shown at once and at the top; the question is kept, and asked again when the server is back")
def offline(user: User) -> None:
    page = user.page
    page.get_by_label("returns").check()
    user.ask()
    user.server.stop()
    user.type_question(f"{QUESTION} Think first.")
    expect(user.turn.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(page.locator("#banner")).to_contain_text("looks for it every two seconds")
    expect(page.locator("#link-text")).to_have_text("offline")
    user.server.start()
    expect(page.locator("#link-text")).to_have_text("connected", timeout=WAIT)
    expect(page.locator("#banner")).to_be_hidden()
    user.turn.get_by_role("button", name="Ask again").click()
    expect(user.turn.locator(".answer")).to_contain_text("So the return is accepted.", timeout=WAIT)
    user.wrong.clear()  # the browser logs each request that came to nothing


@check(
    "regenerate, edit, copy: in place of the last turn, or from an earlier one on; what was before stays in the list"
)
def goes_back(user: User) -> None:
    page = user.page
    page.get_by_label("support").check()
    for question in ("What is the plan?", "What is the season?", "What is the renewal?"):
        user.ask(question)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)  # of the last turn
    page.get_by_role("button", name="Regenerate").click()
    expect(user.turn.locator(".cost")).to_contain_text(re.compile(r"^1 of \d+ tokens decoded"), timeout=WAIT)
    same((page.locator(".turn").count(), user.turn.locator("h3").inner_text()), (3, "What is the renewal?"))
    user.edit(1).press("Escape")
    expect(page.get_by_role("button", name="Edit").nth(1)).to_be_focused()
    edited = user.edit(1)
    edited.fill("What is the renewal?")
    edited.press("Enter")
    expect(page.locator(".turn")).to_have_count(2)
    expect(user.turn.locator(".answer")).to_have_text("2026-09-10", timeout=WAIT)
    same(user.strip()[0][0], "kept")
    expect(page.locator("#kept li")).to_have_count(2)
    page.locator("#kept li").last.get_by_role("button").first.click()
    same(page.locator("h3").all_inner_texts()[1:], ["What is the plan?", "What is the season?", "What is the renewal?"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for way in ("", "delete Navigator.prototype.clipboard"):  # as where the server is not on this machine
        user.turn.get_by_role("button", name="Copy").click()
        expect(user.turn.get_by_role("button", name="Copied")).to_be_visible()
        page.evaluate("window.read ??= () => clipboard.readText(); window.clipboard ??= navigator.clipboard")
        same(page.evaluate("read()"), "2026-09-10")
        page.evaluate(f"clipboard.writeText('').then(() => {{ {way} }})")
        expect(user.turn.get_by_role("button", name="Copied")).to_be_hidden()


@check(
    "kept: after a reload the conversation goes on, with its skills, corrections and prompts; one or all are deleted"
)
def keeps(user: User) -> None:
    page, kept = user.page, user.page.locator("#kept li")
    page.get_by_label("returns").check()
    page.get_by_label("System text").fill("Be brief.")
    user.correct("date", "2026-07-01")
    same(user.ask(), "refused")
    page.reload()
    same(user.turn.locator(".answer").inner_text(), "refused")
    expect(page.get_by_label("returns")).to_be_checked()
    expect(page.get_by_label("date", exact=True)).to_have_value("2026-07-01")
    expect(page.get_by_label("System text")).to_have_value("Be brief.")
    expect(page.locator("#correction")).to_be_hidden()  # the model has read it
    same([kind for kind, _ in user.strip()].count("erratum"), 1)
    same(user.ask("What is the tier?"), "gold")
    same(user.strip()[0][0], "kept")
    page.get_by_role("button", name="New conversation").click()
    user.ask("What is the amount?")
    same([one.inner_text().split("\n")[0] for one in kept.all()], ["What is the amount?", QUESTION])
    with page.context.expect_page() as opened:
        page.evaluate("open(location.href, '', 'noopener')")
    other = User(opened.value, user.server)
    other.page.get_by_role("button", name=QUESTION).click()
    same(other.page.locator(".turn").count(), 2)
    page.once("dialog", lambda dialog: dialog.dismiss())
    kept.first.get_by_role("button", name="Delete").click()
    expect(kept).to_have_count(2)
    page.on("dialog", lambda dialog: dialog.accept())
    kept.first.get_by_role("button", name="Delete").click()  # the one in this tab
    expect(kept).to_have_count(1)
    expect(other.page.locator("#kept li")).to_have_count(1)
    same(page.locator(".turn").count(), 0)
    user.ask("What is the amount?")
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#conversations")).to_be_hidden()
    same((page.evaluate("localStorage.length"), page.locator(".turn").count()), (0, 0))
    same((other.page.locator(".turn").count(), other.wrong), (2, []))


@check("kept in two tabs: each goes on with the same conversation, and neither loses a turn; the oldest make room")
def keeps_both(user: User) -> None:
    page, kept = user.page, user.page.locator("#kept li")
    user.ask("What is the tier?")
    with page.context.expect_page() as opened:
        page.evaluate("open(location.href)")
    other = User(opened.value, user.server)
    same(other.page.locator(".turn").count(), 1)
    other.ask("What is the plan?")
    user.ask("What is the season?")
    expect(kept).to_have_count(2)
    long = "{id: '0', at: 1, turns: [{question: 'old', answer: 'x'.repeat(1.9e6), model: ''}]}"
    page.evaluate(f"localStorage['notes-conversation-0'] = JSON.stringify({long})")
    page.reload()
    expect(kept.last).to_contain_text("old")
    user.type_question("x" * 150_000)  # more than the model can read
    expect(user.turn.get_by_role("alert")).to_be_visible()
    expect(kept).to_have_count(2)
    user.wrong.clear()  # the browser logs the 400


@check("not kept: where the browser refuses or is full, one line is shown, and the conversation goes on in the tab")
def keeps_nothing(user: User) -> None:
    page, line = user.page, user.page.locator("#not-kept")
    page.evaluate("localStorage.other = 'x'.repeat(5 * 1024 * 1024 - 100)")
    page.get_by_label("returns").check()
    same(user.ask(), "accepted")
    expect(line).to_have_text(re.compile("^The browser has no room for this conversation[^\n]*$"))
    page.evaluate("localStorage.clear()")
    same((user.ask(), page.locator(".turn").count()), ("accepted", 2))
    expect(line).to_be_hidden()
    refuse = "for (const one of ['localStorage', 'sessionStorage']) Object.defineProperty(window, one, {get})"
    page.add_init_script(f"const get = () => {{ throw new DOMException('', 'SecurityError') }}; {refuse}")
    page.reload()
    page.get_by_label("returns").check()
    same((user.ask(), user.ask(), page.locator(".turn").count()), ("accepted", "accepted", 2))
    expect(line).to_be_visible()


@check("stop: a question that is not answered yet is given up, by the button and by Escape")
def stops(user: User) -> None:
    held: list[Route] = []
    user.page.route("**/v1/chat/completions", lambda route: held.append(route))
    for way in ("button", "Escape"):
        user.type_question(QUESTION)
        expect(user.page.get_by_role("button", name="Stop")).to_be_visible()
        if way == "button":
            user.page.get_by_role("button", name="Stop").click()
        else:
            user.page.keyboard.press("Escape")
        expect(user.turn).to_contain_text("Stopped.")
        expect(user.page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    same(len(held), 2)
    user.page.unroute_all(behavior="ignoreErrors")


@check("stop: what has been answered is kept, also where the page is reloaded before the end")
def stops_later(user: User) -> None:
    page = user.page
    for end in ("Escape", "reload"):
        page.evaluate(HALF)
        user.type_question(QUESTION)
        expect(user.turn.locator(".answer")).to_have_text("half")
        same((page.locator("#delete-all").is_disabled(), page.locator("#clear").is_hidden()), (True, True))
        page.keyboard.press("Escape") if end == "Escape" else page.reload()
        expect(user.turn.get_by_role("button", name="Regenerate")).to_be_visible()
        expect(user.turn.locator(".answer")).to_have_text("half")
        same(user.turn.get_by_text("Stopped.").count(), int(end == "Escape"))
    asked = sends(user, "whole")
    user.turn.get_by_role("button", name="Regenerate").click()
    expect(user.turn.locator(".answer")).to_have_text("whole")
    same([message["content"] for message in asked[0]["messages"]], [QUESTION, "half", QUESTION])


def sends(user: User, text: str, **end: Any) -> list[dict[str, Any]]:
    """Have the server answer with this text in pieces; return a list that gets the requests."""
    asked: list[dict[str, Any]] = []
    chunks: list[dict[str, Any]] = [*({"choices": [{"delta": {"content": letter}}]} for letter in text), end]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=body)

    user.page.route("**/v1/chat/completions", answer)
    return asked


@check("Markdown: lists, tables, quotes, code, bold are elements; links, HTML and stars between numbers stay text")
def writes_markdown(user: User) -> None:
    sends(user, (HERE / "answer.md").read_text(encoding="utf-8"))
    user.type_question(QUESTION)
    elements = user.turn.locator(".answer:not(.running)").inner_html().replace("><", ">\n<")
    same(elements, (HERE / "answer.html").read_text(encoding="utf-8").strip())


@check("cut: in words for a full context, for the longest answer, and for a server's limit; the numbers are sent")
def cuts(user: User) -> None:
    user.page.get_by_label("Longest answer").fill("7")
    for words, tokens, total in (("7 tokens, your", 7, 20), ("no longer ones", 5, 20), ("fills the 4,096", 5, 4096)):
        usage = {"completion_tokens": tokens, "total_tokens": total}
        asked = sends(user, "x", choices=[{"finish_reason": "length"}], usage=usage)
        user.type_question(QUESTION)
        expect(user.turn).to_contain_text(words)
        same([asked[-1][key] for key in ("temperature", "max_tokens", "repeat_penalty")], [0, 7, 1])
    user.page.get_by_label("Temperature").fill("9")
    user.type_question(QUESTION)
    same(user.page.locator(".turn").count(), 3)


@check("add a text: dropped or chosen, it is compiled and picked; another of that name is replaced only if wanted")
def adds(user: User) -> None:
    user.page.evaluate(DROP, ["Loan Rules.md", "days: 21\n\nA book is lent for 21 days.\n"])
    expect(user.page.get_by_label("loan-rules", exact=True)).to_be_checked(timeout=WAIT)
    expect(user.page.get_by_label("days", exact=True)).to_have_value("21")
    user.page.evaluate(DROP, ["photo.png", [137, 80, 255]])
    expect(user.page.locator("#adding")).to_contain_text("photo.png is not a text")
    other = {"name": "returns.txt", "mimeType": "text/plain", "buffer": b"date: 2026-09-09\n\nAll is new.\n"}
    user.page.get_by_label("Add a text").set_input_files(other)  # type: ignore[arg-type]
    user.page.get_by_role("button", name="Replace it").click()
    expect(user.page.get_by_label("date", exact=True)).to_have_value("2026-09-09", timeout=WAIT)
    user.wrong.clear()  # the browser logs the 409


@check("texts stay texts: HTML in a skill, a question and a value is shown as it is written")
def literal(user: User) -> None:
    page = user.page
    page.get_by_label("hostile").check()
    page.get_by_role("button", name="Text", exact=True).click()
    expect(page.locator(".text")).to_contain_text("<script>document.title=2</script>")
    page.keyboard.press("Escape")
    user.correct("owner", "<b>Eve</b>")
    user.ask("<img src=x onerror=alert(1)>")
    expect(user.turn.locator("h3")).to_have_text("<img src=x onerror=alert(1)>")
    same((page.locator("img, b:not(.cost b)").count(), page.title()), (0, "notes"))


@check("keyboard alone: a skill, Tab, the question; arrows go from skill to skill, Enter to its fields, Escape back")
def two_stops(user: User) -> None:
    keys, page = user.page.keyboard, user.page
    page.get_by_label("beyond").focus()
    around = (("Right", "hostile"), ("Down", "returns"), ("Left", "hostile"), ("Up", "beyond"))
    for arrow, name in around:
        keys.press(f"Arrow{arrow}")
        expect(page.get_by_label(name)).to_be_focused()
    keys.press("ArrowLeft")
    keys.press("Space")
    expect(page.get_by_label("support")).to_be_checked()
    keys.press("Tab")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    keys.press("Shift+Tab")
    expect(page.get_by_label("support")).to_be_focused()
    page.get_by_label("returns").check()
    keys.press("Enter")
    expect(page.get_by_label("date", exact=True)).to_be_focused()
    user.correct("date", "2026-07-01")
    keys.press("Escape")
    expect(page.get_by_label("returns")).to_be_focused()
    keys.press("Tab")
    keys.type(QUESTION)
    keys.press("Enter")
    expect(user.turn.locator(".answer")).to_have_text("refused", timeout=WAIT)


@check("keyboard alone: pick, correct, ask, look at the numbers, open and close the text")
def keyboard(user: User) -> None:
    page = user.page
    expect(page.get_by_label("returns")).to_be_visible()

    def reach(wanted: Locator, key: str = "Tab") -> None:
        for _ in range(60):
            page.keyboard.press(key)
            if wanted.evaluate("node => node === document.activeElement"):
                return
        raise AssertionError(f"{key} does not come to {wanted}")

    reach(page.get_by_label("beyond"))
    reach(page.get_by_label("returns"), "ArrowRight")
    page.keyboard.press("Space")
    expect(page.get_by_label("returns")).to_be_focused()
    reach(page.get_by_label("date", exact=True))
    page.keyboard.press("Control+A")
    page.keyboard.type("2026-07-01")
    page.keyboard.press("Enter")
    expect(page.get_by_label("date", exact=True)).to_be_focused()
    reach(page.get_by_role("button", name="Text", exact=True))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Text", exact=True)).to_be_focused()
    expect(page.locator("#text-title")).to_have_count(0)  # the dialog is emptied a moment after it is closed
    reach(page.get_by_label("Question", exact=True))
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    expect(user.turn.locator(".bar")).to_be_visible(timeout=WAIT)
    same(user.turn.locator(".answer").inner_text(), "refused")
    expect(page.locator("#status")).to_contain_text("Answer: refused", timeout=WAIT)
    reach(user.turn.locator(".numbers summary"))
    page.keyboard.press("Enter")
    expect(user.turn.get_by_role("cell", name="erratum")).to_be_visible()


@check("names for screen readers: no control is without one, and the strip says its numbers")
def named(user: User) -> None:
    user.page.get_by_label("returns").check()
    user.ask()
    for role in ("button", "textbox", "checkbox"):
        for one in user.page.get_by_role(role).all():  # type: ignore[arg-type]
            name = one.evaluate("n => (n.labels?.[0]?.textContent || n.getAttribute('aria-label') || n.textContent)")
            same(bool(name.strip()), True)
    bar = user.page.get_by_role("img").last
    same((bar.get_attribute("aria-label") or "").startswith("The prompt: "), True)
    expect(user.page.get_by_role("dialog")).to_have_count(0)


@check("a phone of 320 pixels: nothing is wider than it", small=True)
def phone(user: User) -> None:
    user.page.get_by_label("returns").check()
    user.page.get_by_label("support").check()
    user.ask()
    user.strip()
    user.panel()
    same(user.page.evaluate("document.documentElement.scrollWidth"), SMALLEST["width"])
    user.page.get_by_role("button", name="Text", exact=True).first.click()
    same(user.page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth"), True)


@check("a key: asked for, refused when it is wrong, kept in this tab alone", key=KEY)
def locked(user: User) -> None:
    page = user.page
    page.get_by_label("This server wants an API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="does not accept this key")).to_be_visible()
    page.get_by_label("This server wants an API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_label("returns").check()
    same(user.ask(), "accepted")
    same(page.evaluate("[sessionStorage['notes-key'], document.cookie]"), [KEY, ""])
    same(page.evaluate("[localStorage.length, JSON.stringify(localStorage).includes('secret')]"), [1, False])
    user.wrong.clear()  # the browser logs each 401


@check("contrast of all text in light: at least 4.5")
@check("contrast of all text in dark: at least 4.5", scheme="dark")
def contrast(user: User) -> None:
    user.page.get_by_label("returns").check()
    user.correct("date", "2026-07-01")
    user.ask()
    user.strip()
    for dialog in (False, True):
        if dialog:
            user.open_text()
        ratio, where = user.page.evaluate(CONTRAST)
        if ratio < 4.5:
            raise AssertionError(f"{ratio:.2f} at {where}")
