"""Record a newcomer's first ten minutes in a terminal: docs/first-ten-minutes.md as recording, text and picture.

    python -m bench.record --write docs/first-ten-minutes

The commands of the page are typed into a shell in an empty folder, with an empty home. What came is written down as it
came: `session.cast` (asciicast, version 2), `session.txt` (the screen, with what scrolled off it) and `end.png`.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import pty
import random
import re
import select
import shutil
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first-ten-minutes.md"
COLUMNS, ROWS = 80, 34
LONG = 1000  # rows of a screen from which nothing scrolls off
PROMPT = "$ "
SECONDS = 120  # a command may take
COLOURS = {"default": "#d8dee9", "brown": "#ebcb8b", "red": "#bf616a", "green": "#a3be8c", "cyan": "#88c0d0"}
GROUND = "#1d2129"


def commands() -> list[str]:
    """The commands of the page, in its order; some continue in lines that begin with `>`, as the shell shows them."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    typed = re.findall(r"^\$ (.*(?:\n>.*)*)", "".join(blocks), re.M)
    return [re.sub(r"^> ?", "", command, flags=re.M) for command in typed]


class Terminal:
    """A shell on a terminal, and all that it wrote, each piece with its second."""

    def __init__(self, home: Path) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "empty").mkdir()
        notes = home / "bin" / "notes"
        notes.write_text(
            f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m notes_cli "$@"\n', encoding="utf-8"
        )
        notes.chmod(0o755)
        kept = {name: os.environ[name] for name in ("LANG", "OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ}
        environment = {
            "LANG": "C.UTF-8",
            **kept,
            "TERM": "xterm-256color",
            "HOME": str(home),
            "PS1": PROMPT,
            "PATH": f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        }
        self.begun = time.monotonic()
        self.events: list[tuple[float, str]] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(home / "empty")
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-i"], environment)
        ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def __enter__(self) -> Terminal:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)

    def wait(self) -> None:
        """Until the shell asks for the next command."""
        shown = ""
        end = time.monotonic() + SECONDS
        while not shown.endswith(("\n" + PROMPT, "\r" + PROMPT)) and shown != PROMPT:
            assert time.monotonic() < end, shown
            shown = re.sub(r"\x1b\[\?2004[hl]", "", shown + self._read(0.2))

    def type(self, line: str) -> None:
        """As a person does, a key after the other."""
        keys = random.Random(line)
        for key in line:
            os.write(self._terminal, key.encode())
            self._read(0.02 + 0.06 * keys.random())
        os.write(self._terminal, b"\n")

    def _read(self, seconds: float) -> str:
        """Return output of the next seconds."""
        end, found = time.monotonic() + seconds, ""
        while (left := end - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                text = self._decoder.decode(os.read(self._terminal, 65536))
                self.events.append((round(time.monotonic() - self.begun, 3), text))
                found += text
        return found


def cast(events: list[tuple[float, str]]) -> Iterator[str]:
    """The lines of an asciicast."""
    yield json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "env": {"SHELL": "/bin/bash"}})
    for second, text in events:
        yield json.dumps([second, "o", text], ensure_ascii=False)


def screen(events: list[tuple[float, str]]) -> object:
    """Return the final content of a terminal, on a screen long enough for all of it."""
    import pyte

    shown = pyte.Screen(COLUMNS, LONG)
    stream = pyte.Stream(shown)
    for _, text in events:
        stream.feed(text)
    return shown


def picture(shown: object, path: Path) -> None:
    """The screen, character by character, as far as something is on it."""
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    size, wide, high, edge = 14, 8.43, 18, 14
    regular = ImageFont.truetype(findfont("DejaVu Sans Mono"), size)
    bold = ImageFont.truetype(findfont("DejaVu Sans Mono:bold"), size)
    buffer, lines = shown.buffer, [line.rstrip() for line in shown.display]  # type: ignore[attr-defined]
    last = max(number for number, line in enumerate(lines) if line.strip(PROMPT))
    image = Image.new("RGB", (round(COLUMNS * wide) + 2 * edge, (last + 1) * high + 2 * edge), GROUND)
    draw = ImageDraw.Draw(image)
    for row in range(last + 1):
        typed = lines[row].startswith(PROMPT)  # in green, to be found
        for column, character in enumerate(lines[row]):
            cell = buffer[row][column]
            colour = COLOURS["green"] if typed else COLOURS.get(cell.fg, COLOURS["default"])
            draw.text((edge + column * wide, edge + row * high), character, colour, bold if cell.bold else regular)
    image.quantize(32).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the first ten minutes.")
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "first-ten-minutes", help="the folder")
    folder = parser.parse_args().write
    home = Path(tempfile.gettempdir()) / "ada"
    shutil.rmtree(home, ignore_errors=True)
    try:
        with Terminal(home) as terminal:
            for command in commands():
                time.sleep(0.6)
                terminal.type(command)
                terminal.wait()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    shown = screen(terminal.events)
    text = "\n".join(line.rstrip() for line in shown.display).rstrip()  # type: ignore[attr-defined]
    (folder / "session.cast").write_text("\n".join(cast(terminal.events)) + "\n", encoding="utf-8")
    (folder / "session.txt").write_text(text.removesuffix(PROMPT.strip()).rstrip() + "\n", encoding="utf-8")
    picture(shown, folder / "end.png")
    print(f"{len(commands())} commands in {terminal.events[-1][0]:.0f} s: {folder}")


if __name__ == "__main__":
    main()
