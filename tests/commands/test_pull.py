"""`notes pull`: downloads from a local hub; models are then usable by name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notes_cli.errors import ModelError
from notes_cli.library.download import choose_file

from .conftest import Outcome, command_line
from .hub import Hub, serving
from .test_json import documented

SIZES = {"a-Q4_K_M.gguf": 3, "a-Q8_0.gguf": 5, "mmproj-a-F16.gguf": 2, "README.md": 1}
PARTS = {f"Q8_0/big-Q8_0-0000{part}-of-00003.gguf": part for part in (1, 2, 3)}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def pull(hub: Hub, tmp_path: Path) -> Callable[..., Outcome]:
    """Run `notes`, for which this hub is Hugging Face."""

    def run(*arguments: str, **more: str) -> Outcome:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        own |= {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN_PATH": str(tmp_path / "none"), **more}
        done = subprocess.run(command_line(*arguments), env={**os.environ, **own}, capture_output=True, text=True)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def test_download_that_is_cut_off_is_not_whole(
    pull: Callable[..., Outcome], hub: Hub, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """An interrupted download leaves no damaged file; -m takes the model by name after a complete one."""
    data = make_model("llama").read_bytes()
    hub.repos["me/tiny-GGUF"] = {"tiny-F32.gguf": data, "README.md": b"text"}
    hub.cut = len(data) // 2
    done = pull("pull", "hf.co/me/tiny-GGUF")
    assert done.code == 0, done.err
    path = Path(done.out.removesuffix("\n"))
    assert path.read_bytes() == data and path.is_relative_to(tmp_path / "hf" / "hub")
    assert "-m me/tiny-GGUF:F32" in done.err
    described = pull("pull", "me/tiny-GGUF", "--dry-run", "--json").json
    keys = documented("pull --json")
    assert set(described) == set(keys) and all(isinstance(described[key], kinds) for key, kinds in keys.items())
    asked = len(hub.asked)
    again = pull("pull", "-q", "me/tiny-GGUF:f32")
    assert (again.code, again.out, again.err) == (0, done.out, "")
    assert not any(line.startswith("GET me/") for line in hub.asked[asked:])  # nothing is fetched again
    assert pull("ask", "Why?", "-n", "1", "-m", "me/tiny-GGUF:F32").code == 0
    assert len(hub.asked) == asked + 2  # asking did not use the network


@pytest.mark.parametrize(
    ("word", "environment", "said"),
    [
        ("me/none", {}, "Hugging Face has no me/none, or it is private"),
        ("me/gated", {}, "https://huggingface.co/me/gated"),
        ("me/down", {}, "Hugging Face refuses me/down: Server error '500"),
        ("me/tiny-GGUF", {"NOTES_OFFLINE": "1"}, "NOTES_OFFLINE is set: nothing is fetched"),
        ("me/tiny-GGUF", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set: nothing is fetched"),
        ("me/tiny-GGUF", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach Hugging Face for me/tiny-GGUF"),
        ("qwen3:0.6b", {}, "ollama pull"),
    ],
)
def test_refused_download_in_several_lines(
    pull: Callable[..., Outcome], hub: Hub, word: str, environment: dict[str, str], said: str
) -> None:
    """Refused in one line with the reason, and status 1."""
    hub.status |= {"me/gated": (403, "GatedRepo"), "me/down": (500, "")}
    done = pull("pull", word, **environment)
    assert done.code == 1 and not done.out
    assert said in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    ("sizes", "tag", "files", "size"),
    [
        (SIZES, None, ("a-Q4_K_M.gguf",), 3),
        (SIZES, "q8_0", ("a-Q8_0.gguf",), 5),
        ({"a-Q5_0.gguf": 7, "b.txt": 1}, None, ("a-Q5_0.gguf",), 7),
        (PARTS, "Q8_0", tuple(PARTS), 6),
    ],
)
def test_wrong_file_is_chosen(sizes: dict[str, int], tag: str | None, files: tuple[str, ...], size: int) -> None:
    """A quantization means its file, all parts of it; none means the only one, or the usual one."""
    choice = choose_file("me/a", tag, sizes)
    assert (choice.files, choice.size) == (files, size)


@pytest.mark.parametrize(
    ("sizes", "tag", "said"),
    [
        ({"README.md": 1}, None, "me/a has no GGUF files"),
        (SIZES, "Q5_0", "me/a has no Q5_0. It has Q4_K_M, Q8_0"),
        ({"a-Q5_0.gguf": 1, "a-Q8_0.gguf": 1}, None, "Name one of me/a:Q5_0, me/a:Q8_0"),
        (dict.fromkeys(list(PARTS)[:2], 1), None, "lacks Q8_0/big-Q8_0-00003-of-00003.gguf"),
    ],
)
def test_missing_file_is_guessed(sizes: dict[str, int], tag: str | None, said: str) -> None:
    """Missing or ambiguous files are refused with a list of those in the repository."""
    with pytest.raises(ModelError) as refused:
        choose_file("me/a", tag, sizes)
    assert said in str(refused.value)
