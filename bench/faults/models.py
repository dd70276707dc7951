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
from bench.faults.mutate import bytes_changed, number_of, parts_changed
from bench.faults.parts import ARRAY, STRING, UINT, Array, Key, Parts, apart
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
VALUES = {
    "tokenizer.ggml.model": (b"gpt2", b"llama", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"no_vocab", b"gemma4"),
    "tokenizer.ggml.pre": (b"default", b"llama-bpe", b"x"),
    "tokenizer.chat_template": TEMPLATES,
    "general.architecture": (
        b"qwen2",
        b"gemma2",
        b"phi3",
        b"llama4",
        b"deepseek2",
        b"mamba2",
        b"rwkv7",
        b"t5",
        b"clip",
    ),
    "token_id": (),
}
ENDS = {"eos": 2, "bos": 1}


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
            rng.choice((parts_changed, parts_changed, parts_changed, _known_key))(rng, parts, rng.choice(self.parts))
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
        pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
        kinds = [struct.pack("<i", kind) for kind in (2, 3, 3, *[6] * 256)]
        scores = [struct.pack("<f", number) for number in range(len(pieces))]
        end, begin = ((f"tokenizer.ggml.{name}_token_id", UINT, struct.pack("<I", one)) for name, one in ENDS.items())
        changed = (
            ("tokenizer.ggml.tokens", ARRAY, Array(STRING, pieces)),
            ("tokenizer.ggml.token_type", ARRAY, Array(5, kinds)),
            ("tokenizer.ggml.scores", ARRAY, Array(6, scores)),
            ("tokenizer.ggml.model", STRING, b"llama"),
            *(end, begin),
        )
        dropped = [b"tokenizer.ggml.merges", *(name.encode() for name, *_ in changed)]
        parts.keys = [key for key in parts.keys if key.name not in dropped]
        parts.keys += [Key(name.encode(), kind, value) for name, kind, value in changed]
    return parts


def _known_key(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Another tokenizer, ids of control tokens, a chat template, or the keys of one architecture under another name."""
    name = rng.choice([*VALUES])
    if name == "token_id":
        for one in rng.sample(("bos", "eos", "unknown", "separator", "padding", "eot", "fim_pre"), 2):
            parts.keys.append(Key(f"tokenizer.ggml.{one}_token_id".encode(), UINT, number_of(rng, 4)))
        return
    old, new = parts.text(name).encode(), rng.choice(VALUES[name])
    parts.set(name, new)
    if name == "general.architecture" and rng.random() < 0.8:
        for key in parts.keys:
            if key.name.startswith(old + b"."):
                key.name = new + key.name[len(old) :]


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
