"""llama.cpp's older cache: files `USER_REPO_FILE.gguf` in one folder, beside them `manifest=USER=REPO=TAG.json`.

Only the manifest says where the user ends and the repository, so a file without one is called by its own name, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from notes_cli.library.hub import bases
from notes_cli.library.named import Named, Tell, files, listed

STORE = "llama.cpp"
_ALIKE = 3  # letters with which a repository and its files begin


def models(root: Path, tell: Tell) -> Iterator[Named]:
    """All models in the folder; what is wrong with one is said in it."""
    names = listed(root, tell)
    known = [parts[1:3] for parts in (name.split("=") for name in names) if parts[0] == "manifest" and len(parts) == 4]
    known.sort(key=lambda parts: -len("_".join(parts)))  # user_repo_more is not of user_repo
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        owner = next((parts for parts in known if name.startswith(f"{'_'.join(parts)}_")), None)
        groups.setdefault((owner[0], owner[1]) if owner else ("", name), []).append(name)
    for (user, repo), group in groups.items():
        paths = [root / name for name in group]
        if user:
            yield from files(STORE, bases(user, repo), paths)
        else:
            yield from (replace(one, tag="") for one in files(STORE, tuple(_guesses(repo)), paths))


def _guesses(name: str) -> Iterator[str]:
    """The name of a file, and what it may have been downloaded as: a split of it in user, repository and file, where
    the file begins as the repository does, as they are called on Hugging Face."""
    yield name.split(".gguf")[0]
    words = name.split("_")
    for user in range(1, len(words) - 1):
        for end in range(user + 1, len(words)):
            repo, file = "_".join(words[user:end]), "_".join(words[end:])
            if repo[:_ALIKE].casefold() == file[:_ALIKE].casefold():
                yield from bases("_".join(words[:user]), repo)
