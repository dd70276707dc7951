"""Documents of all kinds become text, or are refused in one line: 33 of them, each made here."""

from __future__ import annotations

import io
import json
import random
import re
import sys
import zipfile
from pathlib import Path

import pypdf
import pytest

from notes_cli.errors import SkillError
from notes_cli.text import formats
from notes_cli.text.skill import load_skill

FEES = "Return window: 30 days\nFee: 25 dollars"


def pdf(*pages: str, password: str | None = None) -> bytes:
    """Write a PDF with a page for each text. `password`: encrypt it, with "" for permissions alone."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Count {len(pages)}/Kids[{kids}]>>"]
    objects.append("<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for number, page in enumerate(pages):
        text = "".join(f"({line}) Tj T* " for line in page.split("\n") if line)
        stream = f"BT /F 12 Tf 14 TL 72 700 Td {text}ET"
        resources = f"/MediaBox[0 0 595 842]/Resources<</Font<</F 3 0 R>>>>/Contents {5 + 2 * number} 0 R"
        objects.append(f"<</Type/Page/Parent 2 0 R{resources}>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    body = "".join(f"{number} 0 obj\n{content}\nendobj\n" for number, content in enumerate(objects, 1))
    whole = f"%PDF-1.4\n{body}trailer\n<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n0\n%%EOF\n"
    writer, output = pypdf.PdfWriter(clone_from=io.BytesIO(whole.encode())), io.BytesIO()
    for one in writer.pages:
        one.compress_content_streams()
    if password is not None:
        writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(output)
    return output.getvalue()


def packed(**files: str) -> bytes:
    """Write a zip file; in names __ is a slash."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return buffer.getvalue()


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
HEADING = f'<w:styles {WORD}><w:style w:type="paragraph" w:styleId="H"><w:name w:val="heading 1"/></w:style></w:styles>'


def docx(body: str, **more: str) -> bytes:
    files = {
        "_rels/.rels": f'<Relationships xmlns="{RELATIONS}"><Relationship Id="r" Type="{OFFICE}" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
        "word/styles.xml": HEADING,
    }
    return packed(**files, **more)


def paragraph(text: str, style: str = "") -> str:
    look = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{look}<w:r><w:t>{text}</w:t></w:r></w:p>"


def epub(*spine: str, **more: str) -> bytes:
    """Write a book whose chapters one.xhtml and "two 2.xhtml" have one line each, in the order of the spine."""
    items = '<item id="a" href="text/one.xhtml"/><item id="b" href="text/two%202.xhtml"/><item id="c" href="no.xhtml"/>'
    order = "".join(f'<itemref idref="{name}"/>' for name in spine)
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container><rootfile full-path="OEBPS/book.opf"/></container>',
        "OEBPS/book.opf": f"<package><manifest>{items}</manifest><spine>{order}</spine></package>",
        "OEBPS/text/one.xhtml": "<html><head><title>T</title></head><body><h1>One</h1><p>Fee: 25</p></body></html>",
        "OEBPS/text/two 2.xhtml": "<?xml version='1.0'?><html><body><nav>Contents</nav><p>Two</p></body></html>",
    }
    return packed(**files | more)


def notebook(*cells: dict[str, object]) -> bytes:
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "julia"}}, "nbformat": 4}).encode()


def code(source: str, *outputs: dict[str, object]) -> dict[str, object]:
    return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": outputs}


HTML = (
    "<!doctype html><html><head><title>T</title><style>p{color:red}</style></head><body><nav><a href=/>Home</a></nav>"
    '<h1>Returns</h1><p><b>Fee:</b> 25 <a href="x">dollars</a></p><script>var a = 1</script><ul><li>one<li>snake_case'
    '</ul><p hidden>secret<p><img src="a.png" alt="logo"></body></html>'
)
BOMB = "<p>" + "0" * (formats.MAX_MARKUP + 1) + "</p>"

READ = {  # name: bytes, text
    "plain.pdf": (pdf(FEES), FEES),
    "pages.pdf": (pdf("One", "Two"), "One\n\nTwo"),
    "permissions.pdf": (pdf(FEES, password=""), FEES),
    "half-scanned.pdf": (pdf("One", ""), "One"),
    "page.html": (HTML.encode(), "# Returns\n\n**Fee:** 25 dollars\n\n- one\n- snake_case"),
    "minified.html": (
        b"<!doctype html><p>One<p>Two<table><tr><th>Key<th>Value<tr><td>Fee<td>25</table>",
        "One\n\nTwo\n\n| Key | Value |\n| --- | --- |\n| Fee | 25 |",
    ),
    "latin.htm": ('<meta charset="windows-1252"><p>Gebühr: 25 €'.encode("cp1252"), "Gebühr: 25 €"),
    "saved.txt": (b"<!-- saved from x -->\n<html><body>Fee: 25</body>", "Fee: 25"),
    "rule.html": (b"<hr><p>name: x</p><hr><p>Fee: 25", "name: x\n\n---\n\nFee: 25"),
    "report.docx": (docx(paragraph("返品", "H") + paragraph("Fee: 25 €")), "# 返品\n\nFee: 25 €"),
    "table.docx": (
        docx(f"<w:tbl><w:tr><w:tc>{paragraph('Fee')}</w:tc><w:tc>{paragraph('25')}</w:tc></w:tr></w:tbl>"),
        "|  |  |\n| --- | --- |\n| Fee | 25 |",
    ),
    "book.epub": (epub("b", "a"), "Two\n\n# One\n\nFee: 25"),
    "fonts.epub": (epub("a", **{"META-INF/encryption.xml": "<e>fonts/a.ttf</e>"}), "# One\n\nFee: 25"),
    "cells.ipynb": (
        notebook(
            {"cell_type": "markdown", "source": "# Fees\nFee: 25"},
            code(
                "print(1)\n2",
                {"output_type": "stream", "text": ["1\n"]},
                {"data": {"text/plain": "2", "image/png": "iVBO"}},
            ),
        ),
        "# Fees\nFee: 25\n\n```julia\nprint(1)\n2\n```\n\n```\n1\n```\n\n```\n2\n```",
    ),
    "utf16.txt": ("Gebühr: 25 €".encode("utf-16"), "Gebühr: 25 €"),
    "main.html": (b"<html><body><p>Menu<main>Fee: 25</main><p>Legal</body>", "Fee: 25"),
    "cells.txt": (b'{"cells": 3}', '{"cells": 3}'),
    "tags.md": (b"<b>Fee</b>: 25, and {\\rtf", "<b>Fee</b>: 25, and {\\rtf"),
}
REFUSED = {  # name: bytes, message
    "password.pdf": (pdf(FEES, password="secret"), "is a PDF with a password. Save it without one"),
    "scanned.pdf": (pdf(""), "is a PDF without a text. If it is scanned"),
    "cut.pdf": (b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n", "is a PDF that is damaged: .*Save it again"),
    "script.html": (b"<!doctype html><script>x</script>", "is an HTML page without a text"),
    "deep.html": (b"<div>" * 5000 + b"x", "is an HTML page that is nested too deeply"),
    "large.html": (BOMB.encode(), "has more than 8 MiB of markup"),
    "cut.docx": (docx(paragraph("Fee"))[:200], "is an archive that is damaged"),
    "bomb.docx": (docx(paragraph(BOMB)), "unpacks to more than 8 MiB of markup"),
    "table.xlsx": (packed(xl__workbook__xml=""), "is an archive, and neither a DOCX nor an EPUB"),
    "locked.docx": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "with a password. Save it as DOCX, without one"),
    "locked.epub": (epub("a", **{"META-INF/encryption.xml": "<e>OEBPS/text/one.xhtml</e>"}), "is locked by DRM|by DRM"),
    "short.epub": (epub("c"), "is an archive that is damaged: .*no.xhtml"),
    "cut.ipynb": (notebook(code("x"))[:-9], "is a notebook that is damaged"),
    "letter.rtf": (b"{\\rtf1 Fee}", "is an Office document of another kind"),
    "data.bin": (b"abc\0def: 1\n", "is no text: byte 3 is 0"),
}


@pytest.mark.parametrize("name", READ)
def test_the_text_of_a_document_is_read(tmp_path: Path, name: str) -> None:
    """Nothing is printed on the way, and pages without a text are reported."""
    data, text = READ[name]
    (tmp_path / name).write_bytes(data)
    skill = load_skill(tmp_path / name)
    assert skill.text == text
    missing = "1 of 2 pages have no text"
    assert [warning.endswith(missing) for warning in skill.warnings] == [True] * (name == "half-scanned.pdf")
    if "Fee: 25" in text:
        assert "Fee" in skill.values


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_text_is_refused_in_one_line(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data, says = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SkillError, match=says) as caught:
        load_skill(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name)) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["plain.pdf", "page.html", "report.docx", "book.epub", "cells.ipynb"])
def test_damage_is_reported_in_one_line(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A damaged document gives a text or a short error, and prints nothing."""
    draw, path = random.Random(name), tmp_path / name
    for _ in range(60):
        data = bytearray(READ[name][0])
        for _ in range(draw.choice((1, 5, 30))):
            data[draw.randrange(4, len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice((len(data), draw.randrange(8, len(data))))])
        try:
            load_skill(path)
        except SkillError as error:
            assert "\n" not in str(error) and len(str(error)) < len(str(path)) + 250
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "module"), [("plain.pdf", "pypdf"), ("page.html", "lxml"), ("report.docx", "mammoth")]
)
def test_without_the_extra_a_document_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(READ[name][0])
    with pytest.raises(SkillError, match=re.escape("pip install 'notes-cli[documents]'")):
        load_skill(tmp_path / name)
