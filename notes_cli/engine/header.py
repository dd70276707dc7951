"""Opens the files of a GGUF model, and reads their heads: metadata, shapes, sizes, and how its K/V can be reused.

The files are opened once, so that the loaded and the hashed bytes are the same: a path may refer to another file later
(an update, a changed link), a descriptor does not. Writes to an open file show in its timestamps.

The forecast of reuse lets commands answer without loading the model; an open context is the authority
(native/notes_graph.cpp). Its lists follow the llama.cpp that is built here; docs/architectures.md has the measurements.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from notes_cli.engine.gguf import ARRAY, MAGIC, SCALARS, Cursor, FormatError, open_file, read_head
from notes_cli.errors import Help, ModelError, reason

# The names that people know, by llama_ftype (llama.h, enum llama_ftype); "-": a number that is not used any more.
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0 "
    "Q2_0"
)
FILE_TYPES = {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}


@dataclass(slots=True)
class Header:
    """The heads of all files of a model."""

    values: dict[str, int | float | bool | str]  # of an array: how many elements it has
    tensors: dict[str, tuple[int, ...]]  # their shapes, as the file has them
    size: int  # bytes of all files

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
    paths, whole = parts(path), Header({}, {}, 0)
    for part in paths:
        try:
            with open_file(part) as file:
                cursor = Cursor(file, "replace")
                head = read_head(cursor)
        except FormatError as error:
            raise ModelError(f"{part}: {error}") from error
        except OSError as error:
            raise ModelError(f"{part}: cannot be read ({reason(error)})") from error
        if head.tensors and head.end > cursor.size:
            have = f"{cursor.size:,} of its {head.end:,} bytes"
            raise ModelError(f"{part}: {have} are there. Was its download interrupted?")
        whole.values = whole.values or head.values
        whole.tensors |= {name: tensor.dims for name, tensor in head.tensors.items()}
        whole.size += cursor.size
    count = whole.number("split.count") or 1
    if count > len(paths):
        raise ModelError(f"{path}: {len(paths)} of its {count} parts are there, by their names")
    return whole


def read_integers(path: Path, key: str) -> list[int]:
    """Read an array of integers from the metadata of a model; [] if there is none of this name."""
    try:
        with open_file(path) as file:
            cursor = Cursor(file, "replace")
            head = read_head(cursor)
            if head.kinds.get(key) != ARRAY:
                return []
            cursor.at = head.offsets[key]
            kind, count = cursor.numbers("IQ")
            return [int(number) for number in cursor.numbers(f"{count}{SCALARS[kind]}")] if kind in SCALARS else []
    except (FormatError, OSError):
        return []


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
        if magic != MAGIC:
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
