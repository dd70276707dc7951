"""Hostile model files: false values in valid form, cuts, and garbage.

A model is loaded, tokenizes a question by its template, and decodes a few tokens, all by `notes ask`, in a process of
its own. llama.cpp may not survive that; the user is to get one line and the status 1 all the same.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

import gguf

# All that a mutant needs is loaded before it gets a copy of this process.
import notes_cli.commands.ask
import notes_cli.runtime.assemble
import notes_cli.runtime.generate  # noqa: F401
from bench.faults.frame import ACCEPTED, REFUSED, ROOT, Mutants, check, traced, waited
from bench.faults.mutate import GGUF, TEXTS, Change, bytes_changed, number_of
from bench.faults.parts import ARRAY, STRING, UINT, Key, Parts, apart
from notes_cli import cli

sys.path.append(str(ROOT / "tests"))
from tiny import TEMPLATE, write_model  # type: ignore[import-not-found]

PATIENCE = 40.0  # seconds a model
MEMORY = 4 << 30  # bytes that a model of half a megabyte may make us take

KINDS: tuple[tuple[Any, ...], ...] = (
    *(("llama", {}), ("llama", {"scaling": "yarn"}), ("llama", {"quantization": gguf.GGMLQuantizationType.Q8_0})),
    *((kind, {}) for kind in ("qwen2", "qwen3", "smollm3", "gemma", "gemma3", "mistral3", "lfm2", "mamba")),
    *(("gpt2", {}), ("phi3", {"name": "long"}), ("llama", {"bos": True}, True)),
)
TOKENIZERS = (b"gpt2", b"llama", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"no_vocab", b"gemma4")
NAMES = (b"qwen2", b"gemma2", b"phi3", b"llama4", b"deepseek2", b"mamba2", b"rwkv7", b"bert", b"t5", b"clip")
TEMPLATES = (
    b"{{ 'a' * (10 ** 10) }}",
    b"{% for i in range(10 ** 9) %}{% for j in range(10 ** 9) %}{% endfor %}{% endfor %}",
    b"{{ messages[0].__class__.__mro__ }}",
    b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    b"{" * 3000,
    b"{{ (" * 500 + b"1" + b") }}" * 500,
    b"{{ 10 ** (10 ** 7) }}",
    b"{{ raise_exception('no') }}",
    TEMPLATE.encode()[:100],
    b"",
)


class Models(Mutants):
    """Mutants of a few sound models."""

    cases, patience, suffix = 2_500, PATIENCE + 20, ".gguf"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.path = self.folder() / "mutant.gguf"
        self.parts = [sound(self.path, *kind) for kind in KINDS]

    def mutant(self, rng: random.Random, number: int) -> bytes:
        if number < len(self.parts):
            return self.parts[number].bytes()
        parts = rng.choice(self.parts).copy()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice((*GGUF, *CHANGES))(rng, parts, rng.choice(self.parts))
        data = parts.bytes()
        if rng.random() < 0.1:
            data = bytes_changed(rng, data[:20_000], [data]) + data[20_000:]
        return data[: rng.randrange(len(data))] if rng.random() < 0.05 else data

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        self.path.write_bytes(data)
        outcome = asked(self.path)
        check(outcome == ACCEPTED or number >= len(self.parts), "a sound model is refused")
        return outcome


def sound(path: Path, kind: str, settings: dict[str, Any], spm: bool = False) -> Parts:
    """A tiny model of the kind, taken apart. `spm`: with a tokenizer of pieces with scores."""
    size = {"layers": 2, "embd": 64 if kind in ("qwen2", "phi3") else 32}
    parts = apart(write_model(path, kind, **size, **settings).read_bytes(), segment=False)
    path.unlink()
    if spm:
        names = {key.name: key for key in parts.keys}
        count = 259
        pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
        values = struct.pack("<IQ", STRING, count) + b"".join(struct.pack("<Q", len(one)) + one for one in pieces)
        names[b"tokenizer.ggml.tokens"].value = values
        names[b"tokenizer.ggml.token_type"].value = struct.pack("<IQ259i", 5, count, 2, 3, 3, *[6] * 256)
        names[b"tokenizer.ggml.model"].value = b"llama"
        names[b"tokenizer.ggml.eos_token_id"].value = struct.pack("<I", 2)
        names[b"tokenizer.ggml.bos_token_id"].value = struct.pack("<I", 1)
        parts.keys = [key for key in parts.keys if key.name != b"tokenizer.ggml.merges"]
        parts.keys.append(
            Key(b"tokenizer.ggml.scores", ARRAY, struct.pack("<IQ259f", 6, count, *map(float, range(259))))
        )
    return parts


# ---- changes of the parts in place, beside those of all GGUF files


def _vocabulary(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Tokens that are empty, twice there, of any bytes; fewer or more of them than the embedding has."""
    key = parts.key("tokenizer.ggml.tokens")
    if key is None or key.kind != ARRAY or len(key.value) < 12:
        return
    tokens, at = [], 12
    while at + 8 <= len(key.value):
        size = int.from_bytes(key.value[at : at + 8], "little")
        tokens.append(key.value[at + 8 : at + 8 + size])
        at += 8 + size
    for _ in range(rng.choice((1, 3, 50))):
        if tokens:
            new = rng.choice((rng.choice(TEXTS).encode(), rng.choice(tokens), rng.randbytes(3)))
            tokens[rng.randrange(len(tokens))] = new
    way = rng.randrange(4)
    if way == 0:
        tokens = tokens[: rng.randrange(len(tokens) + 1)]
    elif way == 1:
        tokens += [b"more %d" % number for number in range(rng.choice((1, 100, 5000)))]
    body = b"".join(struct.pack("<Q", len(token)) + token for token in tokens)
    key.value = struct.pack("<IQ", STRING, len(tokens)) + body


def _tokenizer(rng: random.Random, parts: Parts, donor: Parts) -> None:
    for name, values in (
        ("tokenizer.ggml.model", TOKENIZERS),
        ("tokenizer.ggml.pre", (b"default", b"llama-bpe", b"x")),
    ):
        if rng.random() < 0.6:
            parts.set(name, rng.choice(values))
    for name in ("bos", "eos", "unknown", "separator", "padding", "eot", "fim_pre"):
        if rng.random() < 0.2:
            parts.keys.append(Key(f"tokenizer.ggml.{name}_token_id".encode(), UINT, number_of(rng, UINT)))


def _template(rng: random.Random, parts: Parts, donor: Parts) -> None:
    parts.set("tokenizer.chat_template", rng.choice(TEMPLATES))


def _architecture(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """The keys of one architecture under the name of another."""
    old, new = parts.text("general.architecture").encode(), rng.choice(NAMES)
    parts.set("general.architecture", new)
    if rng.random() < 0.8:
        for key in parts.keys:
            if key.name.startswith(old + b"."):
                key.name = new + key.name[len(old) :]


CHANGES: tuple[Change, ...] = (_vocabulary, _vocabulary, _tokenizer, _template, _architecture)


def asked(path: Path) -> str:
    """The outcome of `notes ask` with this file, in a process."""
    errors = path.with_suffix(".err")
    errors.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _ask(path, errors)
    code, used = waited(child, PATIENCE)
    text = errors.read_text(encoding="utf-8", errors="replace")
    check(used.ru_maxrss * 1024 <= MEMORY, f"{used.ru_maxrss >> 20} GiB", "crash")
    check("Traceback" not in text and code in (0, 1), f"status or signal {code}: {text[-300:]}", "crash")
    clear = text.count("\n") == 1 and text.startswith("notes: ")
    check(code == 0 or clear, f"no clear line: {text[:300]}")
    check("\x1b" not in text, f"escapes: {text[:300]!r}")
    return REFUSED if code else ACCEPTED


def _ask(path: Path, errors: Path) -> NoReturn:
    """Run in the child, and always exit here, so that the child does not continue with other cases."""
    status = 2
    try:
        for number, file in enumerate((os.devnull, os.devnull, str(errors))):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY, 4 * MEMORY))
        status = cli.run(["ask", "What is it?", "-m", str(path), "-n", "3", "-t", "1", "-c", "512"])
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, f"Traceback: {traced(error)}".encode())
    finally:
        os._exit(status)
