"""Takes the text out of PDF, HTML, DOCX, EPUB and notebooks, as Markdown where they have headings, lists and tables.

Only visible text is taken: no scripts, menus, addresses of links, or images. Libraries of the extra `documents` read
the formats, and raise any exception for a damaged file.
"""

from __future__ import annotations

import io
import json
import logging
import posixpath
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

from notes_cli.errors import SkillError

MAX_MARKUP = 8 << 20  # bytes of HTML or XML, unpacked: more text than contexts hold, parsed in a minute
MARKUP = re.compile(r"\.(?:x?html?|xml|rels|opf)$", re.I)  # names of files in an archive
INVISIBLE = "title, script, style, template, noscript, nav, button, [hidden]"
INSTALL = "Install what reads it: pip install 'notes-cli[documents]'"


class Document(NamedTuple):
    """The text of a document, and a warning about it."""

    text: str
    warning: str = ""


def read_document(data: bytes, suffix: str, source: str) -> Document | None:
    """Return the text of a document; None if the bytes are in no such format. `suffix`: of the file's name, which
    decides for HTML and notebooks that do not begin as such. Raises SkillError for a document that cannot be read."""
    for sign, suffixes, kind, read in FORMATS:
        if sign.match(data) or suffix.lower() in suffixes:
            with _reading(source, kind):
                document = read(data)
            text = re.sub(r"[ \t]+$", "", document.text, flags=re.M)
            if not text.strip():
                raise SkillError(
                    f"{source} is {kind} without a text",
                    "If it is scanned or drawn by a script, save the text that it shows",
                )
            return document._replace(text=text)
    return None


@contextmanager
def _reading(source: str, kind: str) -> Iterator[None]:
    """Raise all errors in the block as SkillError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SkillError as error:
        raise SkillError(f"{source} {error.what}", error.remedy) from error
    except ImportError as error:
        raise SkillError(f"{source} is {kind}, and {error.name} is not installed", INSTALL) from error
    except RecursionError as error:
        raise SkillError(f"{source} is {kind} that is nested too deeply", "Save its text") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise SkillError(f"{source} is {kind} that is damaged: {reason}", "Save it again, or save its text") from error


def _pdf(data: bytes) -> Document:
    import pypdf

    logging.getLogger("pypdf").addHandler(logging.NullHandler())  # else its remarks are printed
    reader = pypdf.PdfReader(io.BytesIO(data))
    try:
        if reader.is_encrypted and not reader.decrypt(""):
            raise SkillError("is a PDF with a password", "Save it without one")
        pages = [page.extract_text().strip() for page in reader.pages]
    except pypdf.errors.DependencyError as error:  # AES takes another library
        raise SkillError("is an encrypted PDF", "Save it without encryption") from error
    warning = f"{pages.count('')} of {len(pages)} pages have no text" if "" in pages else ""
    return Document("\n\n".join(filter(None, pages)), warning)


def _html(data: bytes | str) -> Document:
    import lxml  # noqa: F401  # parses for BeautifulSoup
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    if len(data) > MAX_MARKUP:
        raise SkillError(f"has more than {MAX_MARKUP >> 20} MiB of markup", "Take a part of it")
    soup = BeautifulSoup(data, "lxml")
    for tag in soup.select(INVISIBLE):
        tag.decompose()
    converter = MarkdownConverter(
        heading_style="ATX", bullets="-", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    text = converter.convert_soup(soup.main if len(soup("main")) == 1 else soup)
    text = re.sub(r"\n[ \t]*(?:\n[ \t]*)+\n", "\n\n", text)
    return Document(re.sub(r"\A\s*(?:---\s+)*", "", text))  # a rule at its beginning is no front matter


def _archive(data: bytes) -> Document:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = archive.namelist()
        texts = [one for one in archive.infolist() if MARKUP.search(one.filename)]
        if sum(one.file_size for one in texts) > MAX_MARKUP:
            raise SkillError(f"unpacks to more than {MAX_MARKUP >> 20} MiB of markup", "Take a part of it")
        if "word/document.xml" in files:
            import mammoth

            return _html(mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: []).value)
        if "META-INF/container.xml" in files:
            return _epub(archive)
    raise SkillError("is an archive, and neither a DOCX nor an EPUB", "Save its text, or as one of the two")


def _epub(archive: zipfile.ZipFile) -> Document:
    """Return the chapters of a book, in the order of its spine."""
    roots = ElementTree.fromstring(archive.read("META-INF/container.xml"))
    (package, *_) = (root.get("full-path", "") for root in roots.iterfind(".//{*}rootfile"))
    book = ElementTree.fromstring(archive.read(package))
    files = {item.get("id"): item.get("href", "") for item in book.iterfind(".//{*}item")}
    chapters = [files[item.get("idref")] for item in book.iterfind(".//{*}itemref")]
    paths = [posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(href))) for href in chapters]
    locked = archive.read("META-INF/encryption.xml").decode() if "META-INF/encryption.xml" in archive.namelist() else ""
    if any(path in locked for path in paths):  # fonts alone may be in there
        raise SkillError("is an EPUB that is locked by DRM", "Take one without")
    return Document("\n\n".join(_html(archive.read(path)).text.strip() for path in paths))


def _notebook(data: bytes) -> Document:
    """Return the cells of a notebook: Markdown, code, and what the code has printed."""
    notebook = json.loads(data.decode("utf-8-sig"))
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        parts.append(f"```{language}\n{source}\n```" if source and cell.get("cell_type") == "code" else source)
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text") or output.get("data", {}).get("text/plain", "")).strip()
            parts.append(f"```\n{printed}\n```" if printed else "")
    return Document("\n\n".join(filter(None, parts)))


def _office(data: bytes) -> Document:
    raise SkillError("is an Office document of another kind, or with a password", "Save it as DOCX, without one")


_HTML = rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,1000}?-->\s*)?<(?:!doctype\s+html|html)\b"
# How files begin, suffixes that are enough, the name in messages, and what reads it.
FORMATS: tuple[tuple[re.Pattern[bytes], tuple[str, ...], str, Callable[[bytes], Document]], ...] = (
    (re.compile(rb"\s{0,1000}%PDF-"), (), "a PDF", _pdf),
    (re.compile(rb"PK\x03\x04"), (), "an archive", _archive),
    (re.compile(_HTML, re.I | re.S), (".html", ".htm", ".xhtml"), "an HTML page", _html),
    (re.compile(rb'\s*\{\s*"(?=.*"nbformat")', re.S), (".ipynb",), "a notebook", _notebook),
    (re.compile(rb"\xd0\xcf\x11\xe0|\{\\rtf"), (), "an Office document", _office),
)
