"""Which models are in a form that llama.cpp reads as it is meant, remembered.

What tells (engine/ollama_form.py) comes after the vocabulary in the head of a file: one of 150,000 tokens takes 40 ms,
before anything is loaded. Models in another form are not remembered: whoever names one is told each time, and why.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from notes_cli.engine import header, ollama_form
from notes_cli.engine.source import parts
from notes_cli.library.digest import remembered


class _OtherForm(Exception):
    """What to say of a model in Ollama's form."""


def form_of(path: Path, memory: Path) -> str:
    """What to say of a model in Ollama's form, "" of any other. `memory`: a JSON file; lost or damaged it costs time.

    Raise ModelError for what is no whole GGUF model.
    """
    rules = _rules()

    def checked() -> str:
        _check(path)
        return rules

    try:
        if not rules or not path.is_file() or parts(path) != [path]:  # of several files one alone would be looked at
            _check(path)
        else:
            with path.open("rb") as file:
                remembered(path, file, memory, checked, only=rules)
    except _OtherForm as found:
        return str(found)
    return ""


def _check(path: Path) -> None:
    if found := ollama_form.form_of_ollama(header.read_header(path)):
        raise _OtherForm(found)


def _rules() -> str:
    """What changes with what tells the forms, 64 hexadecimal digits; "" where that cannot be told."""
    try:
        found = [os.stat(str(module.__file__)) for module in (header, ollama_form)]
    except OSError:  # a package without files
        return ""
    return hashlib.sha256(repr([(one.st_mtime_ns, one.st_size) for one in found]).encode()).hexdigest()
