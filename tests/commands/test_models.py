"""`notes models`, and -m by name: faithful stores of every program, which nothing is ever written to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .. import stores
from .conftest import Notes, on_a_terminal, run_here

NAMES = [
    *("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", "hf.co/unsloth/SmolLM3-GGUF:Q4_K_M", "lfm2:latest"),
    *("me/embed:latest", "mistralai/Mistral-GGUF:Q8_0", "qwen3:0.6b", "user/old-GGUF:Q5_K_M"),
]
OURS = ["notes-tiny", "notes-eye"]  # which come first
BROKEN = ["half/half-GGUF:Q4_0", "lora:latest", "user/old-GGUF"]


@pytest.fixture
def user(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the stores of all programs where they are by default, and in each something that is broken."""
    home = tmp_path / "user"
    ollama, hub = home / ".ollama" / "models", home / ".cache" / "huggingface" / "hub"
    stores.ollama(ollama, "library/qwen3/0.6b", stores.manifest(ollama, make_model("qwen3")))
    stores.ollama(ollama, "hf.co/unsloth/SmolLM3-GGUF/Q4_K_M", stores.manifest(ollama, make_model("smollm3")))
    stores.ollama_v2(ollama, "library/lfm2/latest", stores.manifest(ollama, make_model("lfm2")))
    stores.ollama_v2(ollama, "me/embed/latest", stores.manifest(ollama, make_model("llama-embed")))
    stores.ollama(ollama, "library/lora/latest", stores.manifest(ollama, make_model("llama"), adapter="x"))
    files = {"gemma-3-1b-it-Q4_K_M.gguf": make_model("gemma3"), "mmproj-F16.gguf": make_model("llama")}
    stores.hub(hub, "ggml-org/gemma-3-1b-it-GGUF", files)
    old = stores.hub(hub, "user/old-GGUF", {"old.Q5_K_M.gguf": make_model("mamba")})
    (old.parents[1] / "blobs" / "abc.downloadInProgress").write_bytes(b"GGUF")
    stores.hub(hub, "mistralai/Mistral-GGUF", {"Mistral-Q8_0.gguf": make_model("mistral")})
    half = stores.hub(hub, "half/half-GGUF", {"half-Q4_0.gguf": make_model("llama")}) / "half-Q4_0.gguf"
    half.write_bytes(half.read_bytes()[:9999])
    monkeypatch.delenv("OLLAMA_MODELS")
    return home


@pytest.fixture
def read_only(user: Path) -> Iterator[Path]:
    """The same with every file and folder of it read-only."""
    below = [path for path in user.rglob("*") if not path.is_symlink()]
    for path in below:
        path.chmod(0o500 if path.is_dir() else 0o400)
    yield user
    for path in below:
        path.chmod(0o700)


def test_models_of_all_stores(user: Path) -> None:
    """Sorted by name, with size, quantization, context and support of skills; a damaged model has its problem."""
    rows = run_here("models", "--json").json
    assert [row["name"] for row in rows] == [*OURS, *sorted([*NAMES, *BROKEN])]
    found = {row["name"]: row for row in rows}
    for name in NAMES:
        row = found[name]
        assert row["problem"] is None and row["bytes"] == Path(row["path"]).stat().st_size
        assert (row["quantization"], row["context"]) == ("F32", 8192)
    for name in BROKEN:
        assert found[name]["problem"] and "skills" not in found[name]
    skills = {name: found[name]["skills"] for name in NAMES}
    assert {name for name, how in skills.items() if how == "restored"} == {"lfm2:latest", "user/old-GGUF:Q5_K_M"}
    assert {name for name, how in skills.items() if how == "refused"} == {"me/embed:latest"}
    assert found["qwen3:0.6b"]["architecture"] == "qwen3" and found["qwen3:0.6b"]["why"] is None
    assert "recurrent" in found["lfm2:latest"]["why"]
    assert {row["store"] for row in rows} == {"notes", "Ollama", "Hugging Face"}
    table = run_here("models").out
    assert "\nhalf/half-GGUF:Q4_0: 9,999 of its " in table and table.count("this model has recurrent layers") == 1
    narrow = on_a_terminal(["models"], COLUMNS="80", NO_COLOR="1").splitlines()
    assert any("qwen3:0.6b" in line for line in narrow) and max(map(len, narrow[:14])) <= 80
    assert run_here("models", "-q").out.splitlines() == [*OURS, *NAMES]


def test_a_model_of_every_store_answers(read_only: Path, skill: Path, unprivileged: Notes) -> None:
    """A skill is compiled and asked with, and nothing in any store changes, which could not be written anyway."""
    before = stores.tree(read_only)
    for name in (name for name in NAMES if name != "me/embed:latest"):
        assert run_here("compile", skill, "-m", name).code == 0
        outcome = run_here("ask", "Why?", "-n", 2, "--splice", "returns", "--json", "-m", name)
        assert outcome.code == 0 and outcome.json["tokens"]["total"] > 0
    for refused in ("half/half-GGUF", "lora", "nothing"):
        assert run_here("ask", "Why?", "-m", refused).code == 1
    # with read access only, as to the folder of Ollama's service
    assert unprivileged("models", "-q").out.splitlines() == [*OURS, *NAMES]
    assert unprivileged("ask", "Why?", "-n", "1", "-m", "qwen3:0.6b").code == 0
    assert stores.tree(read_only) == before


def test_a_folder_that_cannot_be_read(user: Path, unprivileged: Notes) -> None:
    """The problem is shown after the other models, and in the error for an unknown name."""
    closed = user / ".ollama" / "models" / "manifests"
    closed.chmod(0)
    try:
        outcome = unprivileged("models")
        assert outcome.code == 0 and "mistralai/Mistral-GGUF:Q8_0" in outcome.out
        assert outcome.err.splitlines()[-1] == f"cannot read {closed}: Permission denied"
        assert f"cannot read {closed}" in unprivileged("ask", "Why?", "-m", "qwen3:0.6b").refusal()
    finally:
        closed.chmod(0o700)


def test_names_in_settings(user: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aliases work for -m, NOTES_MODEL and `model:`; -v prints the file. One named like a flag is not a setting."""
    home.mkdir()
    (home / "config.yaml").write_text("model: small\nmodels:\n  small: qwen3:0.6b\n  json: lfm2\n")
    assert "model small: " in run_here("ask", "Why?", "-n", 1, "-v").err
    monkeypatch.setenv("NOTES_MODEL", "json")
    assert "lfm2" in run_here("doctor").out
    found = run_here("models")
    assert found.out.startswith("name ")
    rows = {row["name"]: row for row in run_here("models", "--json").json}
    assert (rows["small"]["store"], rows["small"]["path"]) == ("config.yaml", rows["qwen3:0.6b"]["path"])


def test_names_that_a_terminal_would_obey(user: Path, make_model: Callable[..., Path]) -> None:
    """They are shown, not sent; a name that is not UTF-8 ends nothing."""
    snapshot = stores.hub(user / ".cache" / "huggingface" / "hub", "a/b", {})
    snapshot.mkdir(parents=True)
    shutil.copy(make_model("llama"), os.fsencode(snapshot) + b"/\x1b[31mred\xff.gguf")
    for arguments in (["models"], ["models", "-q"], ["models", "--json"], ["ask", "x", "-m", "red"]):
        done = run_here(*arguments)
        assert "\x1b" not in done.out + done.err and "red" in done.out + done.err
