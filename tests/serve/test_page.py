"""Tests the web page: complete files, strict headers, and no addresses of other sites."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tree_sitter
import tree_sitter_javascript

from notes_cli.cli import run
from notes_cli.serve import server
from notes_cli.serve.app import FOLDER, TYPES
from notes_cli.serve.prepare import Options

from .conftest import Served, started

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
JAVASCRIPT = tree_sitter.Language(tree_sitter_javascript.language())

# APIs that turn text into HTML or code.
MAKES_HTML = re.compile(
    r"\b(innerHTML|outerHTML|insertAdjacentHTML|setHTML\w*|srcdoc|createContextualFragment|DOMParser|eval|Function)\b"
    r"|document\.write|javascript:|setTimeout\(\s*[\"'`]"
)
ELSEWHERE = re.compile(r"(?:[a-z]+://|data:[a-z]+/|[\"'(=]\s*//)[^\s\"')]*", re.I)
NAMESPACE = "http://www.w3.org/2000/svg"


class Tags(HTMLParser):
    """The tags of a document, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, name: str) -> list[str]:
        return [value for _, attributes in self.found for key, value in attributes.items() if key == name and value]


def index() -> Tags:
    return Tags((FOLDER / "index.html").read_text(encoding="utf-8"))


def elsewhere(text: str) -> list[str]:
    return [found for found in ELSEWHERE.findall(text) if found != NAMESPACE]


def nodes(script: str) -> Iterator[tree_sitter.Node]:
    """Return the syntax nodes of a module."""
    waiting = [tree_sitter.Parser(JAVASCRIPT).parse(script.encode()).root_node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def broken(script: str) -> list[int]:
    return [node.start_point.row + 1 for node in nodes(script) if node.is_error or node.is_missing]


def exports(script: str) -> set[str]:
    found = re.findall(r"^export (?:async )?(?:function\*?|const|let|class) (\w+)", script, re.M)
    return set(found)


def imports(script: str) -> list[tuple[str, set[str]]]:
    found = re.findall(r"^import \{([^}]*)\} from \"\./([\w.]+)\";$", script, re.M)
    assert len(found) == len(re.findall(r"\bimport\b", script)), "an import of another form"
    return [(file, set(re.findall(r"\w+", names))) for names, file in found]


def called(script: str) -> set[str]:
    """Return names that are called but not declared: normally only the browser's."""
    declared, used = set(), set()
    for node in nodes(script):
        name = (node.text or b"").decode()
        parent = node.parent
        if node.type == "identifier" and parent is not None:
            callee = parent.type == "call_expression" and parent.child_by_field_name("function") == node
            (used if callee else declared).add(name)
    return used - declared


@pytest.fixture(scope="module")
def locked(library: Path) -> Iterator[Served]:
    with started(library, Options(keys=("secret",))) as found:
        yield found


def test_files_are_served(locked: Served) -> None:
    """Every file of the page is served without a key, with its type and strict headers; other paths are not."""
    for path in FILES:
        reply = locked.http.get("/" if path.name == "index.html" else f"/page/{path.name}")
        assert (reply.status_code, reply.content) == (200, path.read_bytes()), path.name
        assert reply.headers["content-type"].partition(";")[0] == TYPES[path.suffix]
        policy = dict(one.split(" ", 1) for one in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
        assert reply.headers["x-content-type-options"] == "nosniff"
    for place in ("/page/", "/page/../app.py", "/page/..%2fapp.py", "/page/index.html", "/page/none.js"):
        assert locked.http.get(place).status_code in (401, 404), place
    assert locked.http.get("/v1/models").status_code == locked.http.head("/v1/models").status_code == 401
    head = locked.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


def test_no_page(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(server, "serve", lambda service, *_: given.append(service.options.page))
        assert [run(["serve", "--port", "0", *options]) for options in ([], ["--no-page"])] == [0, 0]
    assert given == [True, False]
    with started(library, Options(page=False)) as served:
        assert [served.http.get(place).status_code for place in ("/page/app.js", "/health")] == [404, 200]
        assert served.http.get("/").text == "Ollama is running"


def test_nothing_from_elsewhere() -> None:
    for path in FILES:
        assert not elsewhere(path.read_text(encoding="utf-8")), path.name
    loaded = [*index().all("src"), *(one for one in index().all("href") if not one.startswith("#"))]
    assert sorted(loaded) == ["page/app.js", "page/icon.svg", "page/style.css"]
    assert all((FOLDER.parent / one).is_file() for one in loaded)
    assert "url(" not in (FOLDER / "style.css").read_text() and "@import" not in (FOLDER / "style.css").read_text()


def test_text_is_never_html() -> None:
    """No script makes HTML or code of a text, and the document has no inline code or style: the policy forbids it."""
    for path in SCRIPTS:
        assert not MAKES_HTML.search(path.read_text(encoding="utf-8")), path.name
    for tag, attributes in index().found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style" and (tag != "script" or "src" in attributes)


def test_scripts() -> None:
    """Each parses, begins with a comment, imports existing names, and uses all of them; app.js reaches each."""
    known = {"fetch", "matchMedia", "requestAnimationFrame", "setTimeout", "clearTimeout", "Number", "String"}
    known |= {"encodeURIComponent", "cancelAnimationFrame"}
    reached, waiting = set(), ["app.js"]
    while waiting:
        path = FOLDER / waiting.pop()
        reached.add(path)
        script = path.read_text(encoding="utf-8")
        assert not broken(script), path
        assert re.match(r"// [A-Z].*[.:?]\n", script), path
        names = {name for _, imported in imports(script) for name in imported}
        for file, imported in imports(script):
            assert imported <= exports((FOLDER / file).read_text(encoding="utf-8")), file
            waiting += [file] if FOLDER / file not in reached else []
        assert not [name for name in names if len(re.findall(rf"\b{name}\b", script)) < 2], "imported, and not used"
        assert called(script) <= known | names | exports(script), "called, and nowhere declared"
    assert reached == {*SCRIPTS}


def test_places_are_there() -> None:
    """Every id in scripts, labels and descriptions exists in the document."""
    ids = index().all("id")
    assert len(ids) == len(set(ids))
    wanted = {one for path in SCRIPTS for one in re.findall(r"byId\(\"([\w-]+)\"\)", path.read_text(encoding="utf-8"))}
    named = {one for key in ("for", "aria-labelledby", "aria-describedby") for one in index().all(key)}
    made = {"text-title"}  # by text.js, when it fills the dialog
    assert wanted and named and (wanted | named) - made <= set(ids)
    controls = [attributes for tag, attributes in index().found if tag in ("input", "textarea", "select")]
    assert controls and all(attributes.get("id") in named for attributes in controls), "a control without a label"


def test_what_is_found() -> None:
    assert elsewhere('import "https://cdn.example/x.js"') and elsewhere('<script src="//cdn.example/x.js">')
    assert elsewhere(f'<svg xmlns="{NAMESPACE}">// a comment') == []
    assert MAKES_HTML.search("node.innerHTML = text") and MAKES_HTML.search("eval(text)")
    assert broken("const a = {;\n") and not broken("const a = b?.c ?? `x${d}`;\n")
    assert called("const a = 1; b(a); a();") == {"b"}
    assert exports("export async function a() {}\nexport const b = 1;") == {"a", "b"}
