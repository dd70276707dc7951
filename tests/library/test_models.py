"""Tests of models by name: all layouts of all stores, resolution of names, and links that leave a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny

from notes_cli.errors import ModelError
from notes_cli.library.models import Models

from .. import stores
from ..refused import refused

MakeModel = Callable[..., Path]


@pytest.fixture
def model(make_model: MakeModel) -> Path:
    return make_model("llama")


@pytest.fixture
def other(make_model: MakeModel) -> Path:
    return make_model("qwen2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def names(store: str, root: Path) -> list[str]:
    return [one.name for one in Models([(store, root)], {}).named if not one.problem]


def check(models: Models, expected: dict[str, Path | str]) -> None:
    """Each word names a model with the bytes of this file, or is refused in these words."""
    for word, wanted in expected.items():
        if isinstance(wanted, Path):
            assert models.find(word).read_bytes() == wanted.read_bytes(), word
        else:
            with refused(ModelError, wanted):
                models.find(word)


def problem(store: str, root: Path) -> str:
    """Why the one model of a store cannot be used."""
    (one,) = Models([(store, root)], {}).named
    return one.problem


DEEP = b'{"layers": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

# Ollama.


@pytest.mark.parametrize("write", [stores.ollama, stores.ollama_v2])
def test_ollama_in_both_layouts(
    write: Callable[..., Path], root: Path, model: Path, other: Path, tmp_path: Path
) -> None:
    """Names in all spellings lead to the blob, also in a store that is a link; of two layouts the newer one counts."""
    (tmp_path / "disk").mkdir()
    root.symlink_to(tmp_path / "disk")
    if write is stores.ollama_v2:
        stores.ollama(root, "me/mine/latest", stores.manifest(root, other))
    write(root, "library/qwen3/0.6b", stores.manifest(root, model, projector="x"))
    write(root, "me/mine/latest", stores.manifest(root, model))
    write(root, "hf.co/unsloth/Qwen3-GGUF/Q4_K_M", stores.manifest(root, model))
    assert names("Ollama", root) == ["hf.co/unsloth/Qwen3-GGUF:Q4_K_M", "me/mine:latest", "qwen3:0.6b"]
    words = ["qwen3:0.6b", "qwen3", "Qwen3:0.6B", "library/qwen3:0.6b", "registry.ollama.ai/library/qwen3:0.6b"]
    words += ["ollama.com/library/qwen3", "me/mine", "me/mine:latest", "hf.co/unsloth/Qwen3-GGUF:q4_k_m"]
    for word in words:
        path = Models([("Ollama", root)], {}).find(word)
        assert path.parent.name == "blobs" and path.read_bytes() == model.read_bytes(), word


@pytest.mark.parametrize("inline", [True, False])
def test_a_list_with_a_manifest_for_each_format(root: Path, model: Path, inline: bool) -> None:
    """The GGUF's manifest is used, in the list or by digest; a list without one is reported."""
    gguf = {**stores.manifest(root, model), "runner": "ollama", "format": "gguf"}
    mlx = {**stores.manifest(root, None, tensor="x"), "runner": "mlx", "format": "safetensors"}
    if not inline:
        digests = [stores.blob(root, json.dumps(child).encode()) for child in (mlx, gguf)]
        mlx = {"mediaType": stores.MANIFEST, "digest": digests[0], "runner": "mlx", "format": "safetensors"}
        gguf = {"mediaType": stores.MANIFEST, "digest": digests[1], "runner": "ollama", "format": "gguf"}
    whole = {"schemaVersion": 2, "mediaType": stores.LIST}
    stores.ollama_v2(root, "library/a/latest", {**whole, "manifests": [mlx, gguf]})
    stores.ollama_v2(root, "library/b/latest", {**whole, "manifests": [mlx]})
    check(Models([("Ollama", root)], {}), {"a": model, "b": "b:latest .* no GGUF, only other formats"})


def test_no_tag_is_latest_else_the_only_one(root: Path, model: Path, other: Path) -> None:
    """As in Ollama. Without a `latest`, several tags are several candidates."""
    both = r"a may be a:4b \(Ollama\) or a:8b \(Ollama\)\. Name one of these"
    for tag, file, wanted in (("8b", other, other), ("4b", model, both), ("latest", model, model)):
        stores.ollama(root, f"library/a/{tag}", stores.manifest(root, file))
        check(Models([("Ollama", root)], {}), {"a": wanted})


@pytest.mark.parametrize(
    "digest",
    [
        *("../../../secret", "sha256:../../secret", "/etc/passwd", "sha256-" + "../" * 21 + "a", ""),
        *(3, None, ["a"], "sha256:" + "g" * 64, "sha256:" + "a" * 63, "sha256:" + "a" * 64 + "/../x"),
    ],
)
def test_a_digest_names_a_blob_and_nothing_else(root: Path, model: Path, tmp_path: Path, digest: Any) -> None:
    """Digests of a model, or of a manifest in a list, cannot contain a path."""
    shutil.copy(model, tmp_path / "secret")
    layers = [{"mediaType": f"{stores.IMAGE}model", "digest": digest}]
    child = {"mediaType": stores.MANIFEST, "digest": digest, "format": "gguf"}
    for manifest in ({"layers": layers}, {"mediaType": stores.LIST, "manifests": [child]}):
        stores.ollama(root, "library/a/latest", manifest)
        assert "which is no digest" in problem("Ollama", root)


def test_what_is_not_a_whole_model(root: Path, model: Path) -> None:
    """An unusable manifest, a LoRA, safetensors, a missing blob and two models are each listed with the problem."""
    two, gone = stores.manifest(root, model), stores.manifest(root, None, model="once")
    two["layers"] += stores.manifest(root, None, model="x")["layers"]
    digest = next(layer["digest"] for layer in gone["layers"] if layer["mediaType"].endswith("model"))
    (root / "blobs" / digest.replace(":", "-")).unlink()
    for manifest, message in (
        (stores.manifest(root, None, model="x", adapter="y"), "adapter"),
        *((stores.manifest(root, None, tensor="x"), "safetensors"), (stores.manifest(root, None), "names no model")),
        *((two, "several models"), (gone, "file is missing")),
        *((content, "is not valid") for content in (b"", b"{", b"[]", b"\xff\xfe", DEEP)),
        *((one, "names no model") for one in (b"{}", b'{"layers": {"mediaType": 3}}', b'{"layers": [3, null, {}]}')),
        (b'{"mediaType": "application/vnd.ollama.manifest.list.v2+json", "manifests": 3}', "no GGUF"),
        (b" " * (4 << 20) + b"{}", "larger than 4 MiB"),
    ):
        stores.ollama(root, "library/a/latest", manifest)
        check(Models([("Ollama", root)], {}), {"a": f"a:latest .* cannot be used: .*{message}"})


def test_links_that_lead_out_of_ollamas_store(root: Path, model: Path, tmp_path: Path) -> None:
    """A manifest or blob that links out of the store, or to itself, is reported and not read."""
    outside = tmp_path / "outside"
    manifest = stores.manifest(outside, model)
    secret = stores.ollama(outside, "library/a/latest", manifest)
    link = root / "manifests" / "registry.ollama.ai" / "library" / "a" / "latest"
    link.parent.mkdir(parents=True)
    link.symlink_to(secret)
    assert "outside of" in problem("Ollama", root)
    link.unlink()
    link.symlink_to(link)
    assert "manifest cannot be used" in problem("Ollama", root)
    link.unlink()
    link.write_text(json.dumps(manifest))
    (root / "blobs").symlink_to(outside / "blobs")
    assert "outside of" in problem("Ollama", root)


# Hugging Face.


def test_hub_names(root: Path, model: Path, other: Path) -> None:
    """By quantization, by the end of the file's name, by all of it; with and without the host; in any case."""
    stores.hub(root, "unsloth/Qwen3-GGUF", {"Qwen3-Q4_K_M.gguf": model, "Qwen3-UD-Q8_K_XL.gguf": other})
    assert names("Hugging Face", root) == ["unsloth/Qwen3-GGUF:Q4_K_M", "unsloth/Qwen3-GGUF:Q8_K_XL"]
    known = Models([("Hugging Face", root)], {})
    expected: dict[str, Path | str] = {
        "unsloth/Qwen3-GGUF:Q4_K_M": model,
        "hf.co/unsloth/Qwen3-GGUF:q4_k_m": model,
        "huggingface.co/UNSLOTH/qwen3-gguf:Qwen3-Q4_K_M": model,
        "unsloth/Qwen3-GGUF:UD-Q8_K_XL": other,
        "unsloth/Qwen3-GGUF:Q8_K_XL": other,
        "unsloth/Qwen3-GGUF": "may be unsloth/Qwen3-GGUF:Q4_K_M .* or unsloth/Qwen3-GGUF:Q8_K_XL",
    }
    unknown = ("unsloth/Qwen3-GGUF:Q8", "unsloth/Qwen3", "Qwen3-GGUF", "unsloth/Qwen3-GGUF:")
    check(known, {**expected, **dict.fromkeys(unknown, "no such model")})
    assert "snapshots" in known.find("unsloth/Qwen3-GGUF:Q4_K_M").parts
    # Two files of one quantization are shown by their whole names.
    root = root / "other"
    stores.hub(root, "a/b", {"m-Q4_K_M.gguf": model, "m-UD-Q4_K_M.gguf": other})
    assert names("Hugging Face", root) == ["a/b:m-Q4_K_M", "a/b:m-UD-Q4_K_M"]
    both = "may be a/b:m-Q4_K_M .* or a/b:m-UD-Q4_K_M"
    check(Models([("Hugging Face", root)], {}), {"a/b:UD-Q4_K_M": other, "a/b:m-UD-Q4_K_M": other, "a/b:Q4_K_M": both})


def test_what_lies_beside_a_model(root: Path, model: Path, other: Path, tmp_path: Path) -> None:
    """A projector, by its name or by its head, a draft, an importance matrix and a readme are no models."""
    lora = tiny.alter_model(tmp_path / "lora.gguf", model, keys={"general.type": "adapter"})
    files = {"m-Q8_0.gguf": model, "mmproj-F16.gguf": other, "m.imatrix.gguf": other, "mtp-m-Q8_0.gguf": other}
    stores.hub(root, "a/b", {**files, "sees-F16.gguf": lora, "README.md": other})
    check(Models([("Hugging Face", root)], {}), {"a/b": model, "a/b:sees-F16": "no language model"})


def test_main_decides_which_snapshot(root: Path, model: Path, other: Path) -> None:
    """Another reference where there is no `main`, all snapshots where there is none; a reference spells no path."""
    new, old = "a" * 40, "b" * 40
    folder = stores.hub(root, "a/b", {"m-Q8_0.gguf": other}, old, "refs-pr").parents[1]
    stores.hub(root, "a/b", {"m-Q8_0.gguf": model}, new)
    both = "may be a/b:m-Q8_0 .* or a/b:m-Q8_0 .*-m .*a{40}.* or -m .*b{40}"
    check(Models([("Hugging Face", root)], {}), {"a/b": model})
    (folder / "refs" / "main").unlink()
    check(Models([("Hugging Face", root)], {}), {"a/b": other})
    shutil.rmtree(folder / "refs")
    check(Models([("Hugging Face", root)], {}), {"a/b": both})
    (folder / "refs").mkdir()
    for text in ("../../../outside", "\xff" * 40, "", new[:39], new + "/.."):
        (folder / "refs" / "main").write_text(text, encoding="latin-1")
        check(Models([("Hugging Face", root)], {}), {"a/b": both})


def test_a_model_in_a_folder_and_in_parts(root: Path, model: Path, tmp_path: Path) -> None:
    """It is one model, its path that of the first part; a part that is missing is named."""
    parts = [f"m-Q8_0-{number + 1:05d}-of-00002.gguf" for number in range(2)]
    made = [tiny.alter_model(tmp_path / part, model, part=(number, 2)) for number, part in enumerate(parts)]
    snapshot = stores.hub(root, "a/b", {f"Q8_0/{path.name}": path for path in made})
    assert names("Hugging Face", root) == ["a/b:Q8_0"]
    assert Models([("Hugging Face", root)], {}).find("a/b:q8_0") == snapshot / "Q8_0" / parts[0]
    (snapshot / "Q8_0" / parts[1]).resolve().unlink()
    check(Models([("Hugging Face", root)], {}), {"a/b": "1 of its 2 parts are there"})


def test_a_download_that_goes_on(root: Path, model: Path) -> None:
    """It is listed as such, unless it may be of anything; a model of the repository that is whole can be used."""
    for name in ("b-GGUF", "b"):
        (root / f"models--a--{name}" / "blobs").mkdir(parents=True)
        (root / f"models--a--{name}" / "blobs" / "abc.incomplete").write_bytes(b"GGUF")
    known = Models([("Hugging Face", root)], {})
    check(known, {"a/b-GGUF": "a/b-GGUF .* a download of it has not been finished"})
    assert len(known.named) == 1
    stores.hub(root, "a/b-GGUF", {"m-Q8_0.gguf": model})
    check(Models([("Hugging Face", root)], {}), {"a/b-GGUF": model})


def test_links_that_lead_out_of_the_hub(root: Path, model: Path, tmp_path: Path) -> None:
    """And those that lead nowhere, or in a circle."""
    snapshot = stores.hub(root, "a/b", {"m-Q8_0.gguf": model})
    link = snapshot / "m-Q8_0.gguf"
    for target, message in ((model, "outside of"), (tmp_path / "none", "missing"), (link, "")):
        link.unlink()
        link.symlink_to(target)
        assert message in problem("Hugging Face", root) != ""
    (snapshot / "loop").symlink_to(snapshot)
    assert len(Models([("Hugging Face", root)], {}).named) == 1


# Any of them.


def test_one_name_in_two_stores(root: Path, model: Path, other: Path, tmp_path: Path) -> None:
    """Two files: refused, with both. One file by two names: that one."""
    second = tmp_path / "second"
    link = stores.hub(root, "me/mine", {"m-Q8_0.gguf": model}) / "m-Q8_0.gguf"
    stores.ollama(second, "me/mine/Q8_0", stores.manifest(second, other))
    both = [("Hugging Face", root), ("Ollama", second)]
    path = Models(both[1:], {}).find("me/mine:Q8_0")
    with refused(ModelError, rf"\(Hugging Face\) or me/mine:Q8_0 \(Ollama\)\. Name its file: -m .* or -m {path}"):
        Models(both, {}).find("me/mine:Q8_0")
    path.unlink()
    path.hardlink_to(link.resolve())
    assert Models(both, {}).find("me/mine").read_bytes() == model.read_bytes()
    outside = tmp_path / "outside.gguf"
    shutil.copy(model, outside)
    link.unlink()
    link.symlink_to(outside)
    assert Models(both, {}).find("me/mine") == path  # the hub's may not lead there


def test_a_path_is_never_a_name(root: Path, model: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes precedence over a name. For a folder or a missing path, the error has the file of that name."""
    stores.hub(root, "me/mine", {"m.gguf": model})
    stores.ollama(root, "library/a/latest", stores.manifest(root, model))
    monkeypatch.chdir(root.parent)
    known = Models([("Hugging Face", root), ("Ollama", root)], {"b": str(model)})
    for word in ("m.gguf", "./a", "../a", "/a", "~/a", "a/b.GGUF"):
        assert known.find(word) == Path(word).expanduser()
    Path("me").mkdir()
    also = "but also the name of a model. Name its file: -m .*m.gguf"
    check(known, {"me/mine": f"me/mine: no such file, {also}"})
    assert known.find("me/other") == Path("me/other")
    Path("me/mine").mkdir()
    Path("b").mkdir()
    shutil.copy(other, "a")
    check(known, {"me/mine": f"me/mine: is a folder, {also}", "b": f"b: is a folder.* -m {model}", "a": other})


def test_aliases(root: Path, model: Path, other: Path) -> None:
    """To a file, to a name, to another alias; they win over names; a circle is an error."""
    stores.ollama(root, "library/a/latest", stores.manifest(root, model))
    given = {"file": str(other), "name": "a", "far": "name", "a": str(other), "gone": "nothing"}
    given |= {"x": "y", "y": "z", "z": "y"}
    known = Models([("Ollama", root)], given)
    assert known.find("file") == known.find("far") == known.find("a") == other
    assert known.find("a:latest").read_bytes() == model.read_bytes()
    check(known, dict.fromkeys("xy", "models in config.yaml goes in a circle: .*y, z, y"))
    problems = {one.name: one.problem for one in known.all}
    assert problems["gone"] == "nothing: no such model" and "circle" in problems["x"] and not problems["file"]


def test_a_miss_says_where_was_looked(root: Path, model: Path) -> None:
    """Suggestions: the same model with another tag, a part of the name, a typo; odd words find nothing."""
    stores.ollama(root, "library/qwen3/0.6b", stores.manifest(root, model))
    stores.hub(root, "google/gemma-GGUF", {"gemma-Q4_0.gguf": model})
    known = Models([("Ollama", root), ("Hugging Face", root)], {})
    places = rf"{root} \(Ollama\), {root} \(Hugging Face\)"
    check(known, {"nothing": rf"^nothing: no such model\. Names are looked up in {places}"})
    check(known, {"qwen3:8b": r"Did you mean qwen3:0\.6b\?"})
    check(known, dict.fromkeys(("gemma", "google/gema-GGUF:Q4_0"), r"Did you mean google/gemma-GGUF:Q4_0\?"))
    for word in ("", "a\0b", "x" * 5000, "~nobody-here", ":", "/", "a:b:c", "\udcff", "a/../../b", "*"):
        with suppress(ModelError):
            assert not known.find(word).is_file()
