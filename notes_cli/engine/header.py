"""Opens the files of a GGUF model, and reads their heads: metadata, shapes, sizes, and how its K/V can be reused.

The files are opened once, so that the loaded and the hashed bytes are the same: a path may refer to another file later
(an update, a changed link), a descriptor does not. Writes to an open file show in its timestamps.

Files are not trusted: nothing is allocated for a length before it is compared with the bytes that there are, and
whatever does not fit raises FormatError. The callers check what the keys mean, and the types that they accept.
Source of the layout: docs/gguf.md of ggml.

The forecast of reuse lets commands answer without loading the model; an open context is the authority
(native/notes_graph.cpp). Its lists follow the llama.cpp that is built here; docs/architectures.md has the measurements.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from notes_cli.errors import Help, ModelError, reason

MAGIC = b"GGUF"
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", 7: "?", UINT64: "Q", 11: "q", 12: "d"}
MAX_DIMS = 4
_LENGTH = struct.Struct("<Q").unpack_from


class FormatError(ValueError):
    """The bytes are not the head of a GGUF file that is read here."""


class ShortError(FormatError):
    """The bytes end before the head does."""


class Value(NamedTuple):
    """The value of a key; of an array its number of elements. `offset`: 8 bytes after it begins, where the bytes of a
    string do."""

    kind: int
    value: int | float | bool | str
    offset: int


class Tensor(NamedTuple):
    """Dimensions with the fastest first, the ggml type, and the offset from the first tensor in bytes."""

    dims: tuple[int, ...]
    kind: int
    offset: int


class Cursor:
    """Reads forward in the first bytes of a file."""

    def __init__(self, data: bytes | memoryview = b"", file: BinaryIO | None = None, size: int = 0) -> None:
        """`file`: of `size` bytes, read as far as needed; strings in it need not be UTF-8. None: all bytes are in
        `data`."""
        self._data, self._file, self.size = data, file, size
        self.at = 0

    def need(self, count: int) -> None:
        """Have the next `count` bytes in memory. Raise ShortError where there are fewer, FormatError where the file has
        fewer or its head is too large."""
        end = self.at + count
        if end <= len(self._data):
            return
        if self._file is None:
            raise ShortError("it ends too early")
        if end > self.size:
            raise FormatError("it ends within its head. Was its download interrupted?")
        if end > MAX_HEAD:
            raise FormatError(f"it has a head of more than {MAX_HEAD >> 20} MiB")
        wanted = min(max(end, 2 * len(self._data), _FIRST), self.size)
        while len(self._data) < wanted:
            chunk = self._file.read(wanted - len(self._data))
            if not chunk:
                raise FormatError("it became shorter while it was read")
            self._data = bytes(self._data) + chunk

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def numbers(self, codes: str) -> tuple[int, ...]:
        """Numbers of these types, as `struct` names them."""
        count = struct.calcsize(f"<{codes}")
        self.need(count)
        self.at += count
        return struct.unpack_from(f"<{codes}", self._data, self.at - count)

    def string(self) -> str:
        try:
            return self.take(self.numbers("Q")[0]).decode("utf-8", "replace" if self._file else "strict")
        except UnicodeDecodeError as error:
            raise FormatError("it holds a string that is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        """Skip strings, of which a vocabulary has a quarter of a million."""
        data, at, known = self._data, self.at, len(self._data) - 8
        for _ in range(count):
            if at > known:
                self.at = at
                self.need(8)
                data, known = self._data, len(self._data) - 8
            at += 8 + _LENGTH(data, at)[0]
        self.at = at
        self.need(0)


def read_counts(cursor: Cursor, most: int) -> tuple[int, int, int]:
    """The version of the format, and the numbers of tensors and of keys, which are `most` each."""
    if cursor.take(4) != MAGIC:
        raise FormatError("it is not a GGUF file")
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise FormatError("it is for big-endian machines" if big else f"it is of GGUF version {version}, not 2 or 3")
    n_tensors, n_keys = cursor.numbers("QQ")
    if max(n_tensors, n_keys) > most:
        raise FormatError("it declares too many entries")
    return version, n_tensors, n_keys


def read_values(cursor: Cursor, count: int) -> dict[str, Value]:
    """The keys and their values, in the order of the file."""
    values: dict[str, Value] = {}
    for _ in range(count):
        key, (kind,) = cursor.string(), cursor.numbers("I")
        if key in values:
            raise FormatError("it holds a key twice")
        offset = cursor.at + 8
        if kind == STRING:
            values[key] = Value(kind, cursor.string(), offset)
        elif kind in SCALARS:
            values[key] = Value(kind, cursor.numbers(SCALARS[kind])[0], offset)
        elif kind == ARRAY:
            of, length = cursor.numbers("IQ")
            if of == STRING:
                cursor.skip_strings(length)
            elif of in SCALARS:
                nbytes = length * struct.calcsize(f"<{SCALARS[of]}")
                cursor.need(nbytes)
                cursor.at += nbytes
            else:
                raise FormatError(f"it holds an array of the unknown type {of}")
            values[key] = Value(kind, length, offset)
        else:
            raise FormatError(f"it holds a value of the unknown type {kind}")
    return values


def read_tensors(cursor: Cursor, count: int) -> dict[str, Tensor]:
    """The tensors by name, in the order of the file."""
    tensors: dict[str, Tensor] = {}
    for _ in range(count):
        name, (n_dims,) = cursor.string(), cursor.numbers("I")
        if name in tensors:
            raise FormatError("it holds a tensor twice")
        if n_dims > MAX_DIMS:
            raise FormatError(f"it holds a tensor of {n_dims} dimensions")
        *dims, kind, offset = cursor.numbers(f"{n_dims}QIQ")
        tensors[name] = Tensor(tuple(dims), kind, offset)
    return tensors


# The names that people know, by llama_ftype (llama.h, enum llama_ftype); "-": a number that is not used any more.
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0 "
    "Q2_0"
)
FILE_TYPES = {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}

# elements of a block -> ggml_type -> bytes of a block (ggml.h)
_BLOCKS = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {
        10: 84,
        11: 110,
        12: 144,
        13: 176,
        14: 210,
        15: 292,
        16: 66,
        17: 74,
        18: 98,
        19: 50,
        21: 110,
        22: 82,
        23: 136,
        29: 56,
        34: 54,
        35: 66,
    },
}
BLOCKS = {kind: (elements, nbytes) for elements, kinds in _BLOCKS.items() for kind, nbytes in kinds.items()}

_FIRST = 1 << 18  # bytes that are read at once to begin with
MAX_HEAD = 1 << 27  # bytes; the largest vocabularies take a tenth
MAX_ENTRIES = 1 << 17  # keys, and tensors


@dataclass(slots=True)
class Header:
    """The heads of all files of a model."""

    values: dict[str, int | float | bool | str]  # of an array: how many elements it has
    tensors: dict[str, tuple[int, ...]]  # their shapes, as the file has them
    size: int  # bytes of all files
    missing: int = 0  # bytes that the files lack for their tensors

    def text(self, key: str) -> str:
        """A value that is a text, "" if it is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """A value that is a whole number, None if it is none."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def quantization(self) -> str:
        """The type of most of its weights, "" if the file does not say it."""
        kind = self.number("general.file_type")
        return "" if kind is None else FILE_TYPES.get(kind, f"type {kind}")

    @property
    def context(self) -> int | None:
        """Tokens that the model was trained for, without RoPE scaling."""
        return self.number(f"{self.architecture}.context_length")

    @property
    def model(self) -> bool:
        """True for a language model; False for a projector, a LoRA adapter or a file with a vocabulary only."""
        return bool(self.tensors) and self.architecture != "clip" and self.text("general.type") in ("", "model")


def read_header(path: Path) -> Header:
    """Read the head of a model, with the tensors of all parts if it is split. Raises ModelError for an invalid or
    incomplete file."""
    whole: Header | None = None
    paths = parts(path)
    for part in paths:
        try:
            with _opened(part) as cursor:
                header = _read(cursor)
        except FormatError as error:
            raise ModelError(f"{part}: {error}") from error
        except OSError as error:
            raise ModelError(f"{part}: cannot be read ({reason(error)})") from error
        if header.missing:
            have = f"{header.size - header.missing:,} of its {header.size:,} bytes"
            raise ModelError(f"{part}: {have} are there. Was its download interrupted?")
        if whole is None:
            whole = header
        else:
            whole.tensors |= header.tensors
            whole.size += header.size
    assert whole is not None
    count = whole.number("split.count") or 1
    if count > len(paths):
        raise ModelError(f"{path}: {len(paths)} of its {count} parts are there, by their names")
    return whole


def read_integers(path: Path, key: str) -> list[int]:
    """Read an array of integers from the metadata of a model; [] if there is none of this name."""
    try:
        with _opened(path) as cursor:
            entry = read_values(cursor, read_counts(cursor, MAX_ENTRIES)[2]).get(key)
            if entry is None or entry.kind != ARRAY:
                return []
            cursor.at = entry.offset - 8
            kind, count = cursor.numbers("IQ")
            return [int(number) for number in cursor.numbers(f"{count}{SCALARS[kind]}")] if kind in SCALARS else []
    except (FormatError, OSError):
        return []


@contextmanager
def _opened(path: Path) -> Iterator[Cursor]:
    """Open a file to read its head."""
    # A pipe that is opened would wait for somebody to write into it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("it is not a regular file")
        if status.st_size < len(MAGIC):
            raise FormatError("it is not a GGUF file")
        yield Cursor(file=file, size=status.st_size)


def _read(cursor: Cursor) -> Header:
    _, n_tensors, n_keys = read_counts(cursor, MAX_ENTRIES)
    values = {key: entry.value for key, entry in read_values(cursor, n_keys).items()}
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"it has an alignment of {alignment}")
    tensors, end = read_tensors(cursor, n_tensors), 0
    for tensor in tensors.values():
        elements, nbytes = BLOCKS.get(tensor.kind, (1, 0))  # of an unknown type: its offset at least
        end = max(end, tensor.offset + prod(tensor.dims) // elements * nbytes)
    start = -(-cursor.at // alignment) * alignment
    whole = max(cursor.size, start + end) if n_tensors else cursor.size
    return Header(values, {name: tensor.dims for name, tensor in tensors.items()}, whole, whole - cursor.size)


_SPLIT = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>[0-9]{5})\.gguf")


class Source:
    """One open file of a model."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be read."""
        self.path = path
        self.file: BinaryIO = path.open("rb", buffering=0)
        self._stamp = stamp(self.file)

    @property
    def changed(self) -> bool:
        """True if the content may have changed since it was opened, or since `accept_content`."""
        return stamp(self.file) != self._stamp

    def accept_content(self) -> None:
        """Accept the present content as unchanged."""
        self._stamp = stamp(self.file)

    def changed_error(self) -> ModelError:
        """Make the error for a changed file."""
        text = f"{self.path} was changed after it was loaded: what was computed belongs to no file"
        return ModelError(text, "Run this again")

    @property
    def loadable(self) -> str:
        """A path by which C opens this very file, even if `path` refers to another one now."""
        name = f"/proc/self/fd/{self.file.fileno()}"
        return name if os.path.exists(name) else str(self.path)

    def close(self) -> None:
        self.file.close()


def stamp(file: BinaryIO) -> tuple[int, ...]:
    """Return the attributes of an open file that change with its content. The modification time alone can be set to
    anything."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def open_sources(path: Path) -> list[Source]:
    """Open all files of the model: a split one (name-00001-of-00003.gguf) has several. Raises ModelError for common
    mistakes with a shorter message than llama.cpp's."""
    if path.is_dir():
        raise ModelError(f"{path}: is a folder", "Name the GGUF file in it")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: is not a regular file", "Name a GGUF file")
    opened: list[Source] = []
    try:
        for part in parts(path):
            opened.append(Source(part))
        magic = opened[0].file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r})", "Name a model in GGUF format")
    except BaseException as error:
        for source in opened:
            source.close()
        if isinstance(error, FileNotFoundError):
            if opened:
                raise ModelError(f"{path}: its part {part.name} is missing", "Put all parts into one folder") from error
            raise ModelError(f"{path}: no such model", Help.NAME_MODEL()) from error
        if isinstance(error, OSError):
            raise ModelError(f"{part}: cannot be read ({error.strerror})") from error
        raise
    return opened


def parts(path: Path) -> list[Path]:
    """Return all files of the model with this first file, by name. A single file with such a name is the whole
    model."""
    if not path.name:  # "." and "/" have no name
        return [path]
    first, *rest = (path.with_name(name) for name in part_names(path.name))
    return [first, *rest] if any(part.exists() for part in rest) else [path]


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model from its first; otherwise the name itself."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]


How = Literal["spliced", "restored", "refused"]

# (support, why not more, architectures)
_LISTS: tuple[tuple[How, str, str], ...] = (
    (
        "spliced",
        "",
        "afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chatglm codeshell cogvlm cohere2 "
        "cohere2moe command-r dbrx deci deepseek deepseek2 deepseek32 dots1 dots3note ernie4_5 ernie4_5-moe exaone "
        "exaone-moe exaone4 falcon gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe gpt-oss gptneox granite "
        "granite_swa granitemoe graniteswitch grok grovemoe hrm_text hy_v3 hy_v4 internlm2 jais jais2 laguna llama "
        "llama4 maple mellum mimo2 minicpm minicpm3 minimax-m2 minimax-m3 mistral3 mistral4 muse-glimmer nanbeige "
        "nemotron olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo3 pockettts qwen "
        "qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3tts qwen3vl qwen3vlmoe refact seed_oss smallthinker smollm3 "
        "spark2_5 stablelm starcoder2 step35 talkie xverse",
    ),
    (
        "restored",
        "this model has recurrent layers, and their state cannot be moved",
        "arwkv7 bailingmoe3 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2 "
        "minimax-01 nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp rwkv6 rwkv6qwen2 rwkv7",
    ),
    (
        "restored",
        "this model learned a vector for every absolute position, so its rows belong where they were computed",
        "gpt2 mpt starcoder",
    ),
    (
        "restored",
        "this model weights its queries and keys after their rotation, so attention depends on absolute positions",
        "hunyuan-dense hunyuan-moe hunyuan_vl maincoder",
    ),
    (
        "restored",
        "how architecture '{}' rotates its keys has not been verified",
        "chameleon deepseek2-ocr gptj plm",
    ),
    (
        "refused",
        "this model keeps no K/V cache (an encoder or a diffusion model)",
        "bert dream eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llada llada-moe llama-embed modern-bert "
        "neo-bert nomic-bert nomic-bert-moe rnd1 wavtokenizer-dec",
    ),
    ("refused", "this model reads with an encoder, which notes does not run", "t5 t5encoder"),
    ("refused", "a draft model's rows belong to the model that it drafts for", "dflash eagle3 gemma4-assistant"),
    (
        "refused",
        "this model compresses its keys over stretches of positions, which cannot be taken apart",
        "deepseek4",
    ),
)


class Skills(NamedTuple):
    """Support for skills: spliced at any position, restored at the start of a prompt only, or refused."""

    how: How
    why: str = ""  # why not more


ARCHITECTURES = {name: Skills(how, why.format(name)) for how, why, names in _LISTS for name in names.split()}


def skills_of(header: Header) -> Skills:
    """Return the support for skills of the model with this header."""
    name = header.architecture
    if not header.model:
        return Skills("refused", "this is no language model")
    if form := ollama_evidence(header):
        return Skills("refused", f"this model is {form}")
    skills = ARCHITECTURES.get(name) or Skills("refused", f"this llama.cpp has no architecture {name!r}")
    if skills.how != "refused" and header.values.get(f"{name}.attention.causal") is False:
        return Skills("refused", "this model's attention looks ahead, so rows depend on what follows them")
    return skills


# GGUF files written by Ollama's own converter. Ollama repairs them while loading; llama.cpp refuses most (unknown
# names, unexpected tensors) and silently misreads some, whose RoPE scaling or tokenizer has another key.

# Ollama's architecture name -> llama.cpp's, or its replacement.
_NAMES = {
    "deepseekocr": "deepseek2-ocr",
    "glm4moelite": "deepseek2",
    "glmocr": "glm4",
    "gptoss": "gpt-oss",
    "nemotron_h_omni": "nemotron_h_moe",
    "olmo3": "olmo2",
    "qwen25vl": "qwen2vl",
}

# Tensors of vision, audio or draft parts, which llama.cpp expects in separate files.
_EXTRA_TENSORS = ("v.", "a.", "mm.", "mtp.", "model.vision_tower.")

# Keys that llama.cpp's converter does not write; {} is the architecture.
_QWEN35 = ("{}.vision.block_count", "{}.image_token_id", "{}.ssm.v_head_reordered", "{}.rope.mrope_interleaved")
_KEYS = {
    "gemma3": (
        *("{}.mm.tokens_per_image", "{}.rope.global.freq_base", "{}.rope.local.freq_base"),
        *("tokenizer.ggml.add_padding_token", "tokenizer.ggml.add_unknown_token"),
    ),
    "laguna": ("{}.rope.swa.dimension_count", "{}.rope.swa.freq_base"),
    "mistral3": ("{}.rope.scaling.beta_fast", "{}.rope.scaling.mscale_all_dim", "{}.rope.scaling_beta"),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
}

# Keys that llama.cpp requires.
_REQUIRED = {
    "gemma3": "gemma3.attention.layer_norm_rms_epsilon",
    "qwen3vl": "qwen3vl.rope.dimension_sections",
    "qwen3vlmoe": "qwen3vlmoe.rope.dimension_sections",
}

# (prefix, suffix) of tensors that llama.cpp names otherwise.
_TENSORS = {
    "gemma3": ("dense.0.weight", ""),
    "laguna": ("blk.0.attn_g.weight", ""),
    "nemotron_h_moe": ("blk.", ".ffn_latent_in.weight"),
    "qwen3next": ("", ".ssm_dt"),
}

_LLAMA3_TOKENS = 128256

ADVICE = "Take a GGUF of this model that was made for llama.cpp, as those on Hugging Face are"


def ollama_evidence(header: Header) -> str:
    """Describe the evidence that a model is in Ollama's form; "" for other models."""
    sign = _evidence(header.architecture, header)
    return f"in a form of Ollama's own, which llama.cpp refuses or misreads ({sign})" if sign else ""


def _evidence(name: str, header: Header) -> str:
    tensors, values = header.tensors, header.values
    if name in _NAMES:
        return f"architecture {name}, which is {_NAMES[name]} there"
    extra = next((tensor for tensor in tensors if tensor.startswith(_EXTRA_TENSORS)), None)
    if extra:
        return f"it holds the tensor {extra}"
    key = next((key for key in (key.format(name) for key in _KEYS.get(name, ())) if key in values), None)
    if key:
        return f"it has {key}"
    if name in _REQUIRED and _REQUIRED[name] not in values:
        return f"it has no {_REQUIRED[name]}"
    first, last = _TENSORS.get(name, ("", ""))
    if first or last:
        tensor = next((key for key in tensors if key.startswith(first) and key.endswith(last)), None)
        if tensor:
            return f"it holds the tensor {tensor}"
    if name == "lfm2" and "output_norm.weight" in tensors and "token_embd_norm.weight" not in tensors:
        return "its last norm is called output_norm"
    if name == "gemma3n":
        words, layers = (tensors.get(f"{tensor}.weight", ()) for tensor in ("token_embd", "per_layer_token_embd"))
        if words and layers and words[1:2] != layers[1:2]:
            return "its embeddings are of two vocabularies"
    if name == "gemma4" and header.text("tokenizer.ggml.model") == "llama":
        return "its tokenizer is called llama"
    llama3 = name == "llama" and values.get("tokenizer.ggml.tokens") == _LLAMA3_TOKENS
    llama3 = llama3 and "<|start_header_id|>" in header.text("tokenizer.chat_template")
    if llama3 and header.text("tokenizer.ggml.pre") in ("", "default"):
        return "a tokenizer of Llama 3 that is not named so"
    return ""
