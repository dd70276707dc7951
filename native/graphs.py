"""Checks that llama.cpp's graph sources are the ones reviewed for notes_graph.cpp, by their digests in GRAPHS.sha256.

notes_graph.cpp describes how each architecture rotates its keys, and which recurrent states have known dependencies.
That is in llama.cpp's src/models, not in hyper-parameters: after a change there our description, and a splice with it,
may be wrong. prepare.py runs the check at configure time.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

HERE = Path(__file__).parent
LIST = HERE / "GRAPHS.sha256"
PRISTINE = ".notes-pristine"  # file in the sources: SHA-256 of each graph before our patches, lines as in LIST
OURS = HERE / "notes_graph.cpp"
CLASS = r"(?:llama_model|llm_build)_\w+"  # classes of models, and of graphs that several models share


def graphs(source: Path) -> list[str]:
    """Return the files under `source` that build the graphs of the architectures in notes_graph.cpp. Raises ValueError
    for an architecture that is not found: llama.cpp's layout has changed."""
    wanted = sorted(set(re.findall(r"\bLLM_ARCH_\w+", OURS.read_text())))
    classes = _classes((source / "src/llama-model.cpp").read_text())
    header = (source / "src/models/models.h").read_text()
    texts = {path.name: path.read_text() for path in sorted((source / "src/models").glob("*.cpp"))}
    made = {name: file for file, text in texts.items() for name in re.findall(rf"\b({CLASS})::\w+\(", text)}
    files: set[str] = set()
    for arch in wanted:
        names, seen, here = set(classes.get(arch, ())), set[str](), set[str]()
        while names:  # a graph may be shared, or derived from another
            name = names.pop()
            seen.add(name)
            block = re.search(rf"^struct {name}\b.*?^}};", header, re.M | re.S)
            text = texts[made[name]] if name in made else ""
            here |= {made[name]} if name in made else set()
            names |= set(re.findall(rf"\b{CLASS}", (block.group() if block else "") + text)) - seen
        if not here:
            raise ValueError(f"the graph of {arch} is not found in {source / 'src/models'}")
        files |= here
    return [f"src/models/{file}" for file in sorted(files)]


def _classes(text: str) -> dict[str, set[str]]:
    """Return the classes of each architecture in llama.cpp (`case X: case Y: return new Z(params)`)."""
    classes: dict[str, set[str]] = {}
    cases: list[str] = []
    fresh = True  # the next case starts a new list
    for arch, name in re.findall(r"case (LLM_ARCH_\w+):|return new (llama_model_\w+)\(", text):
        if arch:
            cases = [arch] if fresh else [*cases, arch]
            fresh = False
        else:
            for case in cases:
                classes.setdefault(case, set()).add(name)
            fresh = True
    return classes


def changed(source: Path) -> list[str]:
    """Return the differences from GRAPHS.sha256, a sentence per file."""
    known, pristine = _read(LIST), _read(source / PRISTINE)
    differences = []
    for file, digest in known.items():
        if file not in pristine:
            differences.append(f"{file} is gone")
        elif pristine[file] != digest:
            differences.append(f"{file} has changed")
    differences += [f"{file} is new to the list" for file in graphs(source) if file not in known]
    return differences


def record(source: Path) -> None:
    """Record the digests of all graphs in unpatched sources."""
    files = sorted((source / "src/models").glob("*.cpp"))
    digests = {f"src/models/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    _write(source / PRISTINE, digests)


def accept(source: Path) -> None:
    """Write GRAPHS.sha256 after the graphs have been reviewed again."""
    pristine = _read(source / PRISTINE)
    _write(LIST, {file: pristine[file] for file in graphs(source)})


def _read(path: Path) -> dict[str, str]:
    """Return digests by file."""
    return {file: digest for digest, file in map(str.split, path.read_text().splitlines())}


def _write(path: Path, digests: dict[str, str]) -> None:
    path.write_text("".join(f"{digest}  {file}\n" for file, digest in digests.items()))


def refusal(source: Path) -> str:
    """Return a message with the differences and the steps to resolve them; empty without any."""
    try:
        differences = changed(source)
    except ValueError as error:
        return f"{error}. Adapt native/graphs.py"
    if not differences:
        return ""
    return (
        f"the graphs of llama.cpp are not those that native/notes_graph.cpp was written for: {', '.join(differences)}. "
        "Read them again for what they do with K (which layers rotate, with which base, scale and factors, what "
        "follows) and what state they keep, adapt native/notes_graph.cpp, accept them with: "
        "python native/prepare.py build/llama.cpp --accept, and run make zoo."
    )
