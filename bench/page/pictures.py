"""Pictures of the page: light, dark and on a phone, with a corrected conversation, and while it is offline."""

from __future__ import annotations

import io
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from bench.page.user import DESK, PHONE, Server, User, looking

LARGEST = 150 << 10  # bytes
MODEL, SKILL, QUESTION = "smollm2", "store-handbook", "Which carrier delivers the parcels?"
SHOWN = (("light", "light", DESK), ("dark", "dark", DESK), ("phone", "light", PHONE), ("phone-dark", "dark", PHONE))


def pictures(browser: Browser, home: Path, folder: Path) -> None:
    """All of them, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, scheme, size in SHOWN:
        with Server(home, model=MODEL) as server, looking(browser, server, scheme, size) as user:
            corrected(user)
            keep(user.page, folder / f"{name}.png")
    with Server(home, model=MODEL) as server, looking(browser, server) as user:
        user.page.get_by_label(SKILL).check()
        user.ask(QUESTION)
        server.stop()
        user.type_question("What is the delivery time?")
        expect(user.page.locator("#banner")).to_be_visible()
        keep(user.page, folder / "offline.png")


def corrected(user: User) -> None:
    """Return a conversation in which a field was corrected, with its numbers if there is room."""
    page = user.page
    page.get_by_label(SKILL).check()
    page.get_by_label("System text").fill("Answer briefly.")
    user.ask(QUESTION)
    if user.small:
        user.panel()
    user.correct("Carrier", "Bluebird Express")
    if user.small:
        user.panel()
    user.ask(QUESTION)
    if not user.small:
        user.strip()
        page.get_by_label("Question", exact=True).focus()
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_timeout(300)


def keep(page: Page, path: Path) -> None:
    """Save a screenshot with few colours."""
    from PIL import Image

    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.convert("RGB").quantize(255, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    if size > LARGEST:
        raise SystemExit(f"{path} is larger than {LARGEST:,} bytes")
