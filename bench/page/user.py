"""Start a server, and operate its page in a browser."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

from notes_cli.config import SHIPPED_TINY

ROOT = Path(__file__).resolve().parent.parent.parent
DESK, PHONE, SMALLEST = {"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 320, "height": 640}
QUESTION = "May I return this?"
WAIT = 20_000  # milliseconds


class Server:
    """`notes serve` in a process of its own, on a port that stays the same."""

    def __init__(self, home: Path, key: str = "", model: str = SHIPPED_TINY) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        own = {"NOTES_HOME": str(home), "NOTES_MODEL": model, **({"NOTES_API_KEY": key} if key else {})}
        self._environment = {**os.environ, **own}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "notes_cli", "serve", "--port", str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "health"):
                return
            time.sleep(0.1)
        raise SystemExit("notes serve did not start")

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class User:
    """A user of the page."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page, self.server = page, server
        self.wrong: list[str] = []  # errors of the browser
        self.foreign: list[str] = []  # requests to other hosts
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda one: self.wrong.append(one.text) if one.type == "error" else None)
        page.on("request", lambda one: None if one.url.startswith(server.url) else self.foreign.append(one.url))
        page.set_default_timeout(WAIT)
        page.goto(server.url)

    @property
    def small(self) -> bool:
        """On a phone."""
        return self.page.viewport_size in (PHONE, SMALLEST)

    @property
    def turn(self) -> Locator:
        """The last one."""
        return self.page.locator(".turn").last

    def panel(self) -> None:
        """Open the skills, or close them, where they are folded away."""
        self.page.locator("#skills-panel > summary").click()

    def type_question(self, question: str) -> None:
        self.page.get_by_label("Question", exact=True).fill(question)
        self.page.keyboard.press("Enter")

    def ask(self, question: str = QUESTION) -> str:
        """The answer, when its prompt is shown."""
        turns = self.page.locator(".turn").count()
        self.type_question(question)
        expect(self.page.locator(".turn")).to_have_count(turns + 1, timeout=WAIT)
        expect(self.turn.locator(".bar")).to_be_visible(timeout=WAIT)
        return self.turn.locator(".answer").inner_text()

    def edit(self, turn: int = -1) -> Locator:
        """The field in which the question of a turn is edited."""
        self.page.get_by_role("button", name="Edit").nth(turn).click()
        return self.page.get_by_label("The question, edited")

    def correct(self, field: str, value: str) -> None:
        self.page.get_by_label(field, exact=True).fill(value)
        self.page.keyboard.press("Enter")

    def open_text(self) -> Locator:
        """The dialog with the text of the first skill that is ticked."""
        self.page.get_by_role("button", name="Text", exact=True).first.click()
        return self.page.get_by_role("dialog")

    def strip(self) -> list[tuple[str, int]]:
        """Kinds and tokens of the pieces of the last prompt, as its table has them."""
        if not self.turn.locator("details.numbers[open]").count():
            self.turn.locator(".numbers summary").click()
        rows = self.turn.locator(".numbers tbody tr").all()
        kinds = (row.locator("i").get_attribute("class") or "" for row in rows)
        counts = (int(row.locator("td").nth(1).inner_text().replace(",", "")) for row in rows)
        return list(zip(kinds, counts, strict=True))


@contextlib.contextmanager
def looking(
    browser: Browser, server: Server, scheme: str = "light", size: dict[str, int] | None = None
) -> Iterator[User]:
    """A user with a browser of their own."""
    context = browser.new_context(color_scheme=scheme, viewport=size or DESK)  # type: ignore[arg-type]
    try:
        yield User(context.new_page(), server)
    finally:
        context.close()
