"""The files of llama.cpp that were read for notes_graph.cpp, and what they were then: GRAPHS.sha256.

notes_graph.cpp tells how each architecture rotates its keys, and of which ones it is known what their recurrent state
follows from. Hyper-parameters do not say that, the code in src/models does: where it changes, what we tell may be
wrong, and a splice with it. prepare.py asks at configure time.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

HERE = Path(__file__).parent
LIST = HERE / "GRAPHS.sha256"
PRISTINE = ".notes-pristine"  # in the sources: the SHA-256 of each graph before our patches, lines as in LIST
OURS = HERE / "notes_graph.cpp"
CLASS = r"(?:llama_model|llm_build)_\w+"  # of a model, and of graphs that several models share


def graphs(source: Path) -> list[str]:
    """The files under `source` that make the graphs of the architectures that notes_graph.cpp names.

    Raise ValueError for one that cannot be found: llama.cpp has been arranged otherwise.
    """
    wanted = sorted(set(re.findall(r"\bLLM_ARCH_\w+", OURS.read_text())))
    classes = _classes((source / "src/llama-model.cpp").read_text())
    header = (source / "src/models/models.h").read_text()
    texts = {path.name: path.read_text() for path in sorted((source / "src/models").glob("*.cpp"))}
    made = {name: file for file, text in texts.items() for name in re.findall(rf"\b({CLASS})::\w+\(", text)}
    files: set[str] = set()
    for arch in wanted:
        names, seen, here = set(classes.get(arch, ())), set[str](), set[str]()
        while names:  # a graph may be another one's, or built on it
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
    """By architecture: the classes that llama.cpp makes for it (`case X: case Y: return new Z(params)`)."""
    found: dict[str, set[str]] = {}
    cases: list[str] = []
    fresh = True  # the next case begins a new list
    for arch, name in re.findall(r"case (LLM_ARCH_\w+):|return new (llama_model_\w+)\(", text):
        if arch:
            cases = [arch] if fresh else [*cases, arch]
            fresh = False
        else:
            for case in cases:
                found.setdefault(case, set()).add(name)
            fresh = True
    return found


def changed(source: Path) -> list[str]:
    """What is not as it was read, a sentence a file."""
    known, pristine = _read(LIST), _read(source / PRISTINE)
    found = []
    for file, digest in known.items():
        if file not in pristine:
            found.append(f"{file} is gone")
        elif pristine[file] != digest:
            found.append(f"{file} has changed")
    found += [f"{file} is new to the list" for file in graphs(source) if file not in known]
    return found


def record(source: Path) -> None:
    """Write down the digests of all graphs in sources that are not patched yet."""
    files = sorted((source / "src/models").glob("*.cpp"))
    digests = {f"src/models/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    _write(source / PRISTINE, digests)


def accept(source: Path) -> None:
    """They have been read again: write their digests down."""
    pristine = _read(source / PRISTINE)
    _write(LIST, {file: pristine[file] for file in graphs(source)})


def _read(path: Path) -> dict[str, str]:
    """Digests by file."""
    return {file: digest for digest, file in map(str.split, path.read_text().splitlines())}


def _write(path: Path, digests: dict[str, str]) -> None:
    path.write_text("".join(f"{digest}  {file}\n" for file, digest in digests.items()))


def refusal(source: Path) -> str:
    """What to do where something is not as it was read, in one paragraph; empty if all is."""
    try:
        found = changed(source)
    except ValueError as error:
        return f"{error}. Adapt native/graphs.py"
    if not found:
        return ""
    return (
        f"the graphs of llama.cpp are not those that native/notes_graph.cpp was written for: {', '.join(found)}. "
        "Read them again for what they do with K (which layers rotate, with which base, scale and factors, what "
        "follows) and what state they keep, adapt native/notes_graph.cpp, accept them with: "
        "python native/prepare.py build/llama.cpp --accept, and run make zoo."
    )
