"""Read every SKILL.md below a folder as `notes compile` does, and count files read, warned about and refused.

    python -m bench.skills FOLDER

No model is needed. Warnings about where a file is (its folder's name, files that it links to) are not counted.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from notes_cli.errors import NotesError
from notes_cli.text.skill import load_skill

OF_THE_PLACE = re.compile(r"differs from its folder|links to ")
VARIES = re.compile(r"'[^']*'|\d[\d,]*|\{\{.*?\}\}")  # in messages of one kind: words of the text, numbers


def kind(message: str, path: Path) -> str:
    """Return a message without the parts that differ by file."""
    text = VARIES.sub("_", message.replace(str(path), "").removeprefix(": ").strip())
    return re.sub(r"(not valid YAML: ).*(\. It is read)", r"\1_\2", text)


def main() -> None:
    """Print the counts; the files of the rarer reasons by name."""
    parser = argparse.ArgumentParser(prog="python -m bench.skills")
    parser.add_argument("folder", type=Path, help="with SKILL.md files at any depth")
    folder = parser.parse_args().folder
    refused: dict[str, list[Path]] = {}
    warned: dict[str, list[Path]] = {}
    files = sorted(folder.rglob("SKILL.md"))
    fields, odd = Counter[int](), 0
    for path in files:
        try:
            skill = load_skill(path)
        except NotesError as error:
            refused.setdefault(kind(error.what, path), []).append(path)
            continue
        found = {kind(warning, path) for warning in skill.warnings if not OF_THE_PLACE.search(warning)}
        for warning in found:
            warned.setdefault(warning, []).append(path)
        odd += bool(found)
        fields[min(len(skill.values), 10)] += 1
    read = sum(fields.values())
    print(f"{len(files):,} files: {read - odd:,} read, {odd:,} read with a warning, {len(files) - read:,} refused")
    for title, kinds in (("refused", refused), ("warnings", warned)):
        print(f"\n{title}:")
        for reason, paths in sorted(kinds.items(), key=lambda one: (-len(one[1]), one[0])):
            print(f"{len(paths):7,}  {reason}")
            for path in paths if title == "refused" else ():
                print(f"         {path}")
    print(
        "\nfields: "
        + ", ".join(f"{count:,} files with {number}" for number, count in sorted(fields.items()))
        + " or more"
    )


if __name__ == "__main__":
    main()
