"""Hostile model files: lies in the right form (counts, lengths, types, values, shapes, places), cuts, and garbage.

A model is loaded, tokenizes a question by its template, and decodes a few tokens, all by `notes ask`, in a process of
its own. llama.cpp may not survive that; the user is to get one line and the status 1 all the same.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import gguf

# All that a mutant needs is loaded before it gets a copy of this process.
import notes_cli.commands.ask
import notes_cli.runtime.assemble
import notes_cli.runtime.generate  # noqa: F401
from bench.faults.frame import ACCEPTED, REFUSED, ROOT, SCRATCH, Budget, Row, Verdict, chance, traced, tried, waited
from bench.faults.mutate import bytes_changed
from bench.faults.parts import ALIGN, Key, Parts, Tensor
from notes_cli import cli

sys.path.append(str(ROOT / "tests"))
from tiny import TEMPLATE, write_model  # type: ignore[import-not-found]

TITLE = (
    "Model files of twelve architectures and two tokenizers, mutated: the head (counts, types, lengths, keys), values "
    "(extremes, other types, arrays cut and grown), the vocabulary, the chat template, tensors (shapes, types, places, "
    "names, numbers that are none), cuts and bytes. Each is loaded, tokenizes and decodes by `notes ask`."
)
FAILS = (
    "a signal, a traceback, more than one line on standard error where it fails, a status other than 0 and 1, 4 GiB."
)
CASES, SHARE = 2_500, 1
PATIENCE = 40.0  # seconds a model
MEMORY = 4 << 30  # bytes that a model of half a megabyte may make us take

KINDS: tuple[tuple[str, dict[str, object]], ...] = (
    *(("llama", {}), ("llama", {"scaling": "yarn"}), ("llama", {"quantization": gguf.GGMLQuantizationType.Q8_0})),
    *((kind, {}) for kind in ("qwen2", "qwen3", "smollm3", "gemma", "gemma3", "mistral3", "lfm2", "mamba")),
    *(("gpt2", {}), ("phi3", {"name": "long"}), ("llama", {"bos": True, "spm": True})),
)
# False values of numbers.
NUMBERS = (0, 1, 2, 3, 7, 64, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
WORDS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\x1b[2J\x1b]0;x\x07",
    b"a" * 5000,
    b"llama",
    b"\xe2\x96\x81",
    b"<|im_start|>",
    b"%s%n",
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


def run(budget: Budget, seed: int) -> Row:
    folder = SCRATCH / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return tried(Models(folder, seed), budget, patience=PATIENCE + 20, say="models")


class Models:
    """Judges mutants of a few sound models."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.parts = [sound(folder / f"sound-{number}.gguf", *kind) for number, kind in enumerate(KINDS)]

    def __call__(self, number: int) -> Verdict:
        data = self.mutant(number)
        path = self.folder / "mutant.gguf"
        path.write_bytes(data)
        verdict = judged(path)
        if verdict.outcome not in ("accepted", "refused"):
            (self.folder / f"failed-{number}.gguf").write_bytes(data)
        return verdict

    def mutant(self, number: int) -> bytes:
        if number < len(self.parts):
            return self.parts[number].bytes()  # as it is: these must be taken
        rng = chance(self.seed, number)
        parts = rng.choice(self.parts).copy()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(LIES)(rng, parts)
        data = parts.bytes()
        if rng.random() < 0.1:
            data = bytes_changed(rng, data[:20_000], [data]) + data[20_000:]
        return data[: rng.randrange(len(data))] if rng.random() < 0.05 else data


def sound(path: Path, kind: str, settings: dict[str, object]) -> Parts:
    """A tiny model of the kind, taken apart. `spm`: with a tokenizer of pieces with scores."""
    spm = settings.get("spm", False)
    plain = {name: value for name, value in settings.items() if name != "spm"}
    parts = apart(write_model(path, kind, layers=2, embd=32, **plain).read_bytes())
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


def apart(data: bytes) -> Parts:
    """A sound model file taken apart: its keys of every type, and its tensors."""
    at = 24
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    def value(kind: int) -> bytes:
        if kind == STRING:
            length = take(8)
            return length + take(int.from_bytes(length, "little"))
        if kind == ARRAY:
            head = take(12)
            element, count = struct.unpack("<IQ", head)
            return head + b"".join(value(element) for _ in range(count))
        return take(struct.calcsize("<" + FORMATS[kind]))

    parts = Parts()
    for _ in range(n_keys):
        name, kind = take(int.from_bytes(take(8), "little")), int.from_bytes(take(4), "little")
        found = value(kind)
        parts.keys.append(Key(name, kind, found[8:] if kind == STRING else found))
    places = []
    for _ in range(n_tensors):
        name, n_dims = take(int.from_bytes(take(8), "little")), int.from_bytes(take(4), "little")
        dims = [int.from_bytes(take(8), "little") for _ in range(n_dims)]
        places.append((name, dims, int.from_bytes(take(4), "little"), int.from_bytes(take(8), "little")))
    start = at + -at % ALIGN
    ends = [*sorted(offset for *_, offset in places)[1:], len(data) - start]
    for (name, dims, kind, offset), end in zip(places, ends, strict=True):
        parts.tensors.append(Tensor(name, dims, kind, data[start + offset : start + end]))
    return parts


# ---- lies


def _number(rng: random.Random, kind: int) -> bytes:
    form = FORMATS[kind]
    if form in "fd":
        return struct.pack("<" + form, struct.unpack("<f", struct.pack("<f", rng.choice((*FLOATS, rng.random()))))[0])
    size = struct.calcsize("<" + form)
    return (rng.choice(NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _key(rng: random.Random, parts: Parts) -> Key:
    return rng.choice(parts.keys)


def lie_number(rng: random.Random, parts: Parts) -> None:
    """A number of the model's, mostly."""
    key = rng.choice([key for key in parts.keys if key.kind in FORMATS])
    key.value = _number(rng, key.kind)


def lie_kind(rng: random.Random, parts: Parts) -> None:
    key = _key(rng, parts)
    key.kind = rng.choice((*FORMATS, STRING, ARRAY, 13, 200, 1 << 31))
    if rng.random() < 0.7 and key.kind in FORMATS:
        key.value = _number(rng, key.kind)


def lie_string(rng: random.Random, parts: Parts) -> None:
    key = rng.choice([key for key in parts.keys if key.kind == STRING])
    key.value = rng.choice((*WORDS, *TOKENIZERS))


def lie_length(rng: random.Random, parts: Parts) -> None:
    key = rng.choice([key for key in parts.keys if key.kind == STRING])
    key.length = rng.choice((*NUMBERS, len(key.value) + 1))


def lie_key(rng: random.Random, parts: Parts) -> None:
    at = rng.randrange(len(parts.keys))
    way = rng.randrange(4)
    if way == 0:
        del parts.keys[at]
    elif way == 1:
        parts.keys.insert(rng.randrange(len(parts.keys)), parts.keys[at])
    elif way == 2:
        parts.keys[at].name = rng.choice(WORDS)
    else:
        parts.keys[at].name = _key(rng, parts).name


def lie_array(rng: random.Random, parts: Parts) -> None:
    key = rng.choice([key for key in parts.keys if key.kind == ARRAY])
    element, count = struct.unpack_from("<IQ", key.value)
    way = rng.randrange(4)
    if way == 0:
        key.value = struct.pack("<IQ", element, rng.choice((*NUMBERS, count + 1, count - 1))) + key.value[12:]
    elif way == 1:
        key.value = struct.pack("<IQ", rng.choice((*FORMATS, STRING, ARRAY, 99)), count) + key.value[12:]
    elif element in FORMATS and count:
        size, at = struct.calcsize("<" + FORMATS[element]), rng.randrange(count)
        key.value = key.value[: 12 + at * size] + _number(rng, element) + key.value[12 + (at + 1) * size :]
    else:
        key.value = struct.pack("<IQ", element, 0)


def lie_vocabulary(rng: random.Random, parts: Parts) -> None:
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
            tokens[rng.randrange(len(tokens))] = rng.choice((*WORDS, rng.choice(tokens), rng.randbytes(3)))
    way = rng.randrange(4)
    if way == 0:
        tokens = tokens[: rng.randrange(len(tokens) + 1)]
    elif way == 1:
        tokens += [b"more %d" % number for number in range(rng.choice((1, 100, 5000)))]
    body = b"".join(struct.pack("<Q", len(token)) + token for token in tokens)
    key.value = struct.pack("<IQ", STRING, len(tokens)) + body


def lie_tokenizer(rng: random.Random, parts: Parts) -> None:
    for name, values in (
        ("tokenizer.ggml.model", TOKENIZERS),
        ("tokenizer.ggml.pre", (b"default", b"llama-bpe", b"x")),
    ):
        if rng.random() < 0.6:
            parts.set(name, rng.choice(values))
    for name in ("bos", "eos", "unknown", "separator", "padding", "eot", "fim_pre"):
        if rng.random() < 0.2:
            parts.keys.append(Key(f"tokenizer.ggml.{name}_token_id".encode(), 4, _number(rng, 4)))


def lie_template(rng: random.Random, parts: Parts) -> None:
    parts.set("tokenizer.chat_template", rng.choice(TEMPLATES))


def lie_count(rng: random.Random, parts: Parts) -> None:
    way = rng.randrange(4)
    if way == 0:
        parts.n_keys = rng.choice((*NUMBERS, len(parts.keys) - 1, len(parts.keys) + 1))
    elif way == 1:
        parts.n_tensors = rng.choice((*NUMBERS, len(parts.tensors) - 1, len(parts.tensors) + 1))
    elif way == 2:
        parts.version = rng.choice((0, 1, 2, 4, 1 << 24, (1 << 32) - 1))
    else:
        parts.keys.append(Key(b"general.alignment", 4, _number(rng, 4)))


def lie_shape(rng: random.Random, parts: Parts) -> None:
    tensor = rng.choice(parts.tensors)
    way = rng.randrange(5)
    if way == 0:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif way == 1:
        tensor.dims = [*tensor.dims, rng.choice(NUMBERS)] if rng.random() < 0.5 else tensor.dims[1:]
    elif way == 2:
        tensor.kind = rng.choice((*range(42), 99, 1 << 31))
    elif way == 3:
        tensor.offset = rng.choice((*NUMBERS, 32, 64))
    else:
        tensor.dims = tensor.dims[::-1]


def lie_tensor(rng: random.Random, parts: Parts) -> None:
    at = rng.randrange(len(parts.tensors))
    way = rng.randrange(5)
    if way == 0 and len(parts.tensors) > 1:
        del parts.tensors[at]
    elif way == 1:
        parts.tensors[at].name = rng.choice((*WORDS[:4], rng.choice(parts.tensors).name, b"blk.9999.attn_k.weight"))
    elif way == 2:
        parts.tensors[at].data = struct.pack("<f", rng.choice(FLOATS)) * (len(parts.tensors[at].data) // 4)
    elif way == 3:
        parts.tensors[at].data = rng.randbytes(len(parts.tensors[at].data))
    else:
        parts.tensors[at].data = parts.tensors[at].data[: rng.randrange(len(parts.tensors[at].data) + 1)]


def lie_name(rng: random.Random, parts: Parts) -> None:
    """The keys of one architecture under the name of another."""
    old = parts.text("general.architecture").encode()
    new = rng.choice(
        (b"qwen2", b"gemma2", b"phi3", b"llama4", b"deepseek2", b"mamba2", b"rwkv7", b"bert", b"t5", b"clip")
    )
    parts.set("general.architecture", new)
    if rng.random() < 0.8:
        for key in parts.keys:
            if key.name.startswith(old + b"."):
                key.name = new + key.name[len(old) :]


LIES: tuple[Callable[[random.Random, Parts], None], ...] = (
    *(lie_number, lie_number, lie_number, lie_kind, lie_string, lie_length, lie_key, lie_array, lie_vocabulary),
    *(lie_vocabulary, lie_tokenizer, lie_template, lie_count, lie_shape, lie_shape, lie_tensor, lie_tensor, lie_name),
)


# ---- judging


def judged(path: Path) -> Verdict:
    """Judge a file by `notes ask` in a process."""
    said = path.with_suffix(".said")
    said.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _ask(path, said)
    try:
        status, used = waited(child, PATIENCE)
    except TimeoutError as error:
        return Verdict("hang", str(error))
    code = os.waitstatus_to_exitcode(status)
    text = said.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if used.ru_maxrss * 1024 > MEMORY:
        return Verdict("crash", f"{used.ru_maxrss >> 20} GiB")
    if code < 0:
        return Verdict("crash", f"signal {signal.Signals(-code).name}: {text[-200:]}")
    if "Traceback" in text or code not in (0, 1):
        return Verdict("crash", f"status {code}: {text[-300:]}")
    if code == 1 and (len(lines) != 1 or not lines[0].startswith("notes: ")):
        return Verdict("wrong", f"{len(lines)} lines: {text[:300]}")
    if "\x1b" in text:
        return Verdict("wrong", f"escapes: {text[:300]!r}")
    return REFUSED if code else ACCEPTED


def _ask(path: Path, said: Path) -> NoReturn:
    """Run in the child, and always exit here, so that the child does not continue with other cases."""
    status = 2
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY, 4 * MEMORY))
        status = cli.run(["ask", "What is it?", "-m", str(path), "-n", "3", "-t", "1", "-c", "512"])
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, f"Traceback: {traced(error)}".encode())
    finally:
        os._exit(status)
