"""Loads a GGUF model: weights, tokenizer and metadata, without contexts or skills."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from notes_cli.engine import devices, native
from notes_cli.engine.header import FILE_TYPES, open_sources
from notes_cli.engine.native import llama
from notes_cli.engine.native import set_log_output as set_log_output  # for commands
from notes_cli.engine.segment import Tokens
from notes_cli.errors import ModelError

# general.name where it is the folder of a training run -> the published name.
PUBLISHED = {"Smollm2 135M 8k Lc100K Mix1 Ep2": "SmolLM2-135M-Instruct"}
SPELT = ("gpt2", "llama", "rwkv")  # tokenizers whose tokens spell the text
DROPS = llama.LLAMA_TOKEN_ATTR_LSTRIP | llama.LLAMA_TOKEN_ATTR_RSTRIP  # tokens that drop the blanks beside them
BLANKS = b" \t\n\v\f\r"
LIKELY = 4  # characters a token: shorter texts are tokenized to know how many tokens they have
BLOCK = 1 << 15  # bytes of a text that TokenBound looks at together
BEGINNING = 16  # bytes of a piece that it compares
LONG_WORD = 4096  # characters, for which std::regex in llama.cpp recurses too deeply for the stack of a thread
STACK = 1 << 10  # bytes of stack for each of them; 262 to 524 were measured
USUAL_STACK = 8 << 20  # bytes
BLANK = "\N{LOWER ONE EIGHTH BLOCK}".encode()  # instead of a blank in tokens of SentencePiece
ANCHORS = ("\n", "\t", ".", "\x01")  # texts put before a part of a text while it is tokenized
Hashes = npt.NDArray[np.uint64]
_stack_lock = threading.Lock()


class Model(AbstractContextManager["Model"]):
    """A loaded GGUF model, shared by contexts. Closing it closes its contexts, which would otherwise compute with freed
    weights."""

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int = -1,
        rpc: Sequence[str] = (),
        loading: Callable[[float], object] | None = None,
    ) -> None:
        """Load `path`. `gpu_layers`: layers to offload, -1 for all that fit. `rpc`: servers of llama.cpp's RPC backend
        ("host:port"), whose devices count as GPUs and come first. `loading` is called with the loaded fraction, 0 to 1.
        Raises ModelError if there is no such file, it is not a GGUF, or llama.cpp cannot load it; EngineError for a
        server that cannot be used."""
        self._handle: Any = None
        self.users: WeakSet[Any] = WeakSet()  # objects that compute with its weights and have a `close`
        self.path = path
        self._devices = devices.device_handles(rpc)  # resolved before anything is loaded
        # True if layers are not in this machine's main memory: all that fit go to a GPU.
        self.offloads = bool(rpc) or any(map(native.ggml.ggml_backend_dev_by_type, devices.GPUS))
        self.placed = gpu_layers, tuple(rpc)  # placement of the layers
        self.sources = open_sources(path)  # all files of the model
        try:
            self._load(gpu_layers, loading)
            self.n_vocab = int(llama.llama_vocab_n_tokens(self.vocab))
            self._check_endless()
        except BaseException:
            self.close()
            raise
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(self._handle))
        # True if some layers keep a state instead of K/V, which cannot be rolled back.
        self.recurrent = bool(llama.llama_model_is_recurrent(self._handle) or llama.llama_model_is_hybrid(self._handle))
        source = llama.llama_model_chat_template(self._handle, None)
        self.chat_template: str | None = source.decode(errors="replace") if source else None  # Jinja source
        # The token that must open every prompt.
        self.bos = int(llama.llama_vocab_bos(self.vocab)) if llama.llama_vocab_get_add_bos(self.vocab) else None
        self.architecture = self.metadata("general.architecture") or "unknown"
        name = self.metadata("general.name") or path.stem
        self.name = PUBLISHED.get(name, name)
        file_type = int(llama.llama_model_ftype(self._handle)) & ~1024  # this bit means "guessed"
        self.quantization = FILE_TYPES.get(file_type, f"type {file_type}")

    def _load(self, gpu_layers: int, loading: Callable[[float], object] | None) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = min(gpu_layers, native.INTS[-1]) if gpu_layers >= 0 else native.INTS[-1]
        if self._devices:
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
        progress = native.loading(loading)  # must live as long as the call
        params.progress_callback = progress
        names = [source.loadable for source in self.sources]
        paths = (ctypes.c_char_p * len(names))(*map(os.fsencode, names))
        native.guard(str(self.path))
        with native.collected_log() as lines:
            self._handle = llama.llama_model_load_from_splits(paths, len(names), params)
        native.raise_kept()
        if not self._handle:
            reason = next((line for line in lines if "error" in line.lower()), "llama.cpp gives no reason")
            for name, source in zip(names, self.sources, strict=True):
                reason = reason.replace(name, str(source.path))
            if "architecture: 'notes'" in reason:
                raise ModelError(f"{self.path}: it is a compiled skill, and no model", "Splice it, and name a model")
            raise ModelError(f"{self.path}: llama.cpp cannot load this model ({reason.strip()})")
        for source in self.sources:
            if source.changed:
                raise ModelError(f"{source.path} changed while it was being loaded", "Try again when it is complete")

    def _check_endless(self) -> None:
        """Refuse files with which llama.cpp never ends: its greedy tokenizer (RWKV) where a byte begins tokens and is
        no token itself, and the CPU kernel of RoPE where no dimension is rotated, over which its loop does not
        advance."""
        if llama.llama_vocab_type(self.vocab) == llama.LLAMA_VOCAB_TYPE_RWKV:
            pieces = {self.token_bytes(token, special=True) for token in range(self.n_vocab)}
            if any(piece[:1] not in pieces for piece in pieces if piece):
                raise ModelError(f"{self.path}: its tokenizer is damaged (no token for some single bytes)")
        if llama.llama_model_rope_type(self.handle) == llama.LLAMA_ROPE_TYPE_NONE:
            return
        for name in ("rope.dimension_count", "rope.dimension_count_swa"):
            if self.metadata(f"{self.metadata('general.architecture')}.{name}") == "0":
                raise ModelError(f"{self.path}: it is damaged ({name} is 0, and its keys are rotated)")

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise ModelError(f"{self.path}: this model is closed")
        return self._handle

    @property
    def vocab(self) -> Any:
        return llama.llama_model_get_vocab(self.handle)

    def close(self) -> None:
        for user in list(self.users):
            user.close()
        native.free_once(self, "_handle", llama.llama_model_free)
        if self.sources:
            native.guard(str(self.path), on=False)
        for source in self.sources:
            source.close()
        self.sources = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def metadata(self, key: str) -> str | None:
        """Return a metadata value of the GGUF as text; None if it is missing."""
        size = llama.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        llama.llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")

    def special_text(self, which: str) -> str:
        """Return the text of the `bos` or `eos` token for a chat template, "" if the model has none."""
        token = {"bos": llama.llama_vocab_bos, "eos": llama.llama_vocab_eos}[which](self.vocab)
        return self.token_bytes(token, special=True).decode(errors="replace") if token >= 0 else ""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return int(llama.llama_model_n_params(self.handle))

    def infill_token(self, which: str) -> int | None:
        """Return the token for the text between two, by llama.cpp's name: pre, suf, mid, rep (the name of a repository)
        or sep (that of a file); None if the model has none."""
        token = int(getattr(llama, f"llama_vocab_fim_{which}")(self.vocab))
        return token if token >= 0 else None

    def tokenize(self, text: str, *, special: bool = False) -> Tokens:
        """Return the token ids of `text` without BOS. `special`: parse control tokens such as <|im_end|>. Otherwise no
        resulting token is a control token (`_is_control`). llama.cpp would still turn a `</think>` or `<tool_call>` in
        user text into one token if the vocabulary marks it user-defined; such texts are tokenized in parts, cut before
        their last character, and the tokens still detokenize to the text. Raises ModelError for a text that cannot be
        encoded so."""
        ids = self._tokenize(text, special)
        cut: set[str] = set()
        while not special and (texts := self._control_texts(text, ids)):
            if texts <= cut:
                raise ModelError(
                    f"{min(texts)!r} in this text is a control token of {self.name}", "Spell it differently"
                )
            cut |= texts
            ids = self._tokenize_parts(_cut(text, cut))
        return ids

    def exceeds(self, text: str, most: int) -> bool:
        """True if a text is certain to have more than `most` tokens, also if it is tokenized in parts. It is not
        tokenized, and read only to where it exceeds them. False if this is not known."""
        if len(text) <= LIKELY * most or self._token_bound is None:
            return False
        return self._token_bound.exceeds(text.encode(), most)

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of the longest token; None if the tokenizer may drop or change characters."""
        return self._token_bound.longest if self._token_bound else None

    @cached_property
    def _token_bound(self) -> TokenBound | None:
        model = self.metadata("tokenizer.ggml.model")
        if model not in SPELT:
            return None
        pieces = [self.token_bytes(token, special=True) for token in range(self.n_vocab)]
        spaced = (token for token, piece in enumerate(pieces) if b" " in piece)
        blank = BLANK if any(BLANK in llama.llama_vocab_get_text(self.vocab, token) for token in spaced) else b""
        if model == "llama":  # a text may get a blank before it
            pieces += [piece[1:] for piece in pieces if piece.startswith(b" ")]
        dropped = bytes({*range(256)} - {piece[0] for piece in pieces if len(piece) == 1})
        if any(llama.llama_vocab_get_attr(self.vocab, token) & DROPS for token in range(self.n_vocab)):
            dropped += BLANKS
        return TokenBound(pieces, dropped, blank)

    def _tokenize(self, text: str, special: bool) -> Tokens:
        data = text.encode()
        if not data:
            return np.zeros(0, np.int32)
        # A text has at most one token per byte, plus a prefix of some tokenizers.
        if len(data) + 8 not in native.INTS:
            raise ModelError(f"a text of {len(data):,} bytes is more than llama.cpp can read")
        buffer = (ctypes.c_int32 * (len(data) + 8))()
        call = partial(llama.llama_tokenize, self.vocab, data, len(data), buffer, len(buffer), False, special)
        longest = max(map(len, re.findall(r"\S+|\s+", text))) if len(text) > LONG_WORD else 0
        count = call() if longest <= LONG_WORD else _with_stack(call, STACK * longest)
        if count < 0:
            raise ModelError(f"the tokenizer of {self.name} cannot encode this text ({len(data)} bytes)")
        return np.array(memoryview(buffer)[:count], np.int32)

    def _tokenize_parts(self, parts: Sequence[str]) -> Tokens:
        """Tokenize a text in parts. SentencePiece adds a leading blank to each text; keep it for the first part
        only."""
        parts_ids = [self._tokenize(parts[0], False)]
        for part in parts[1:]:
            ids = self._tokenize(part, False)
            if self._detokenize(ids) == b" " + part.encode():
                ids = self._tokenize_after(part)
            parts_ids.append(ids)
        return np.concatenate(parts_ids)

    def _tokenize_after(self, part: str) -> Tokens:
        """Tokenize a text that follows another: the tokens after an anchor that no token shares with it."""
        for anchor in ANCHORS:
            ids = self._tokenize(anchor + part, False)
            for first in range(1, min(len(ids), 8)):
                if self._detokenize(ids[:first]) == b" " + anchor.encode():
                    return ids[first:]
        raise ModelError(f"the tokenizer of {self.name} cannot encode {part[:32]!r} after another text")

    def _detokenize(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes(int(token), special=True) for token in ids)

    def _control_texts(self, text: str, ids: Tokens) -> set[str]:
        """Return the texts of control tokens among `ids` that occur in the text."""
        found = {self.text([token], special=True) for token in set(ids.tolist()) if self._is_control(token)}
        return {spelt for spelt in found if spelt and spelt in text}

    def _is_control(self, token: int) -> bool:
        """True if a token acts as markup: a control token, or a user-defined one that looks like it, as `</think>`,
        `<|User|>` and `[INST]` do. Other user-defined tokens are ordinary added words. This depends on the vocabulary
        alone, not on the chat template, so that a text always has the same tokens."""
        kind = llama.llama_vocab_get_attr(self.vocab, token)
        if kind & llama.LLAMA_TOKEN_ATTR_USER_DEFINED:
            return _is_markup(self.text([token], special=True))
        return bool(kind & llama.LLAMA_TOKEN_ATTR_CONTROL)

    def tokenize_runs(self, runs: Iterable[tuple[str, bool]]) -> Tokens:
        """Tokenize runs of (text, whether control tokens in it are parsed) separately and concatenate them."""
        parts = [self.tokenize(text, special=special) for text, special in runs]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, which may be part of a UTF-8 character."""
        self._check_token(token)
        buffer = ctypes.create_string_buffer(256)
        size = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:size]

    def text(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens. `special`: with that of control tokens."""
        return b"".join(self.token_bytes(int(token), special=special) for token in tokens).decode(errors="replace")

    @cached_property
    def end_tokens(self) -> list[int]:
        """All end-of-generation tokens."""
        return [token for token in range(self.n_vocab) if self.ends(token)]

    def ends(self, token: int) -> bool:
        """True if the token ends generation (end of turn, end of text)."""
        self._check_token(token)
        return bool(llama.llama_vocab_is_eog(self.vocab, token))

    def unknown(self, tokens: Iterable[int]) -> int | None:
        """Return the first token outside the vocabulary; None if all are valid."""
        return next((int(token) for token in tokens if not 0 <= token < self.n_vocab), None)

    def _check_token(self, token: int) -> None:
        """Raise ModelError for a token outside the vocabulary: llama.cpp would abort."""
        if not 0 <= token < self.n_vocab:
            raise ModelError(f"token {token} is outside the vocabulary of {self.n_vocab}")


class TokenBound:
    """Tells that a text has more tokens than a number, without tokenizing it.

    Tokens spell the text. So it has at least as many as the fewest pieces of the vocabulary that cover it: if k tokens
    reach no further than some place, the next one begins there or before, and k + 1 reach no further than the longest
    piece of those that begin there or before and match the text, as far as they are compared. Merges and words of the
    tokenizer are not looked at.
    """

    def __init__(self, pieces: Iterable[bytes], dropped: bytes, blank: bytes) -> None:
        """`dropped`: bytes that the tokenizer may drop, which do not count. `blank`: what its tokens have for a blank
        instead; b"" for nothing."""
        self._dropped, self._blank = dropped, blank
        sorted_pieces = sorted({*map(self._counted, pieces)} - {b""}, key=len) or [b"\0"]
        lengths = np.array([*map(len, sorted_pieces)])
        starts, data = np.cumsum(lengths) - lengths, np.frombuffer(b"".join(sorted_pieces), np.uint8)
        self.longest = int(lengths[-1])
        hashes = np.zeros(len(lengths), np.uint64)
        # Beginnings of pieces, by length: their sorted hashes, and the length of the longest piece that is meant, or 0.
        self._beginnings: list[tuple[Hashes, npt.NDArray[np.int64]]] = []
        for size in range(1, min(self.longest, BEGINNING) + 1):
            longer = lengths >= size
            lengths, starts = lengths[longer], starts[longer]
            hashes = _next_hashes(hashes[longer], data[starts + size - 1])
            beginnings, places = np.unique(hashes, return_inverse=True)
            meant = np.zeros(len(beginnings), np.int64)
            np.maximum.at(meant, places, np.where((lengths == size) | (size == BEGINNING), lengths, 0))
            self._beginnings.append((beginnings, meant))

    def exceeds(self, data: bytes, most: int) -> bool:
        """True if a text has more than `most` tokens for certain."""
        text = np.frombuffer(self._counted(data), np.uint8)
        count = end = furthest = 0
        block, lengths = text[:0], np.ones(0, np.int64)
        for first in range(0, len(text), BLOCK):
            before, block = block, text[first : first + BLOCK + BEGINNING]
            if not np.array_equal(block, before):  # a letter may fill megabytes
                lengths = self._lengths(block)
            reached = first + np.arange(len(block)) + lengths
            ends = np.maximum(np.maximum.accumulate(reached[:BLOCK]), furthest).tolist()
            furthest = ends[-1]
            while end < first + len(ends):
                end = ends[end - first]
                count += 1
                if count > most:
                    return True
        return False

    def _counted(self, data: bytes) -> bytes:
        return (data.replace(self._blank, b" ") if self._blank else data).translate(None, self._dropped)

    def _lengths(self, text: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return at most what length a piece has at each place of a text, at least 1."""
        most, places, hashes = np.ones(len(text), np.int64), np.arange(len(text)), np.zeros(len(text), np.uint64)
        for size, (beginnings, meant) in enumerate(self._beginnings, 1):
            inside = int(np.searchsorted(places, len(text) - size, "right"))
            places = places[:inside]
            hashes = _next_hashes(hashes[:inside], text[places + size - 1])
            found = np.minimum(np.searchsorted(beginnings, hashes), len(beginnings) - 1)
            begun = beginnings[found] == hashes
            places, hashes, found = places[begun], hashes[begun], found[begun]
            most[places] = np.maximum(most[places], meant[found])
        return most


def _next_hashes(hashes: Hashes, data: npt.NDArray[np.uint8]) -> Hashes:
    """Return hashes of texts that are one byte longer. Equal ones of different texts only weaken the bound."""
    longer: Hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + data + np.uint64(1)
    return longer


def _with_stack(call: Callable[[], int], size: int) -> int:
    """Call a function in a thread with a stack of so many bytes more than usual. Raises ModelError without memory for
    it."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="tokenize")
    with _stack_lock:
        usual = threading.stack_size((size + USUAL_STACK + 0xFFFF) & ~0xFFFF)
        try:
            thread.start()
        except RuntimeError as error:
            raise ModelError(f"there is no memory to tokenize a word of {size // STACK:,} characters") from error
        finally:
            threading.stack_size(usual)
    try:
        thread.join()
    except BaseException:  # an interrupt: the thread uses the model
        thread.join()
        raise
    return results[0]


def _is_markup(text: str) -> bool:
    """True if a text is enclosed in brackets of any script: <a>, [a], <|a|>, >>a<<, 【a】."""
    text = unicodedata.normalize("NFKC", text).strip()
    ends = {text[:1], text[-1:]}
    return len(text) > 2 and all(end in "<>|" or unicodedata.category(end) in ("Ps", "Pe") for end in ends)


def _cut(text: str, marks: Iterable[str]) -> list[str]:
    """Split the text so that no part contains a mark of two characters or more."""
    spans = [
        (at.start(), at.start() + len(mark)) for mark in marks for at in re.finditer(f"(?={re.escape(mark)})", text)
    ]
    cuts = [0]
    for first, last in sorted(spans, key=lambda span: span[1]):
        if first >= cuts[-1] and last - first > 1:
            cuts.append(last - 1)
    return [text[first:last] for first, last in pairwise([*cuts, len(text)])]
