"""A model's file with other weights: the same numbers in another type, or random ones."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import gguf
import numpy as np

from bench.random_model import finish
from notes_cli.engine.native import llama
from notes_cli.errors import UnsupportedError

# By llama.cpp's quantizer, which leaves embeddings more exact than q4_0 where they are the output layer, too.
KINDS = {"f32": llama.LLAMA_FTYPE_ALL_F32, "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0}


def write_as(model: Path, path: Path, kind: str) -> Path:
    """The model with matrices of one of KINDS, made of the numbers that the file has: what was rounded stays so. Raise
    UnsupportedError where llama.cpp does not do that."""
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = KINDS[kind], True, 1
    if llama.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params)):
        raise UnsupportedError(f"llama.cpp cannot write {model.name} as {kind}")
    return path


def write_random(model: Path, path: Path, seed: int) -> Path:
    """The model with matrices of random numbers, of the mean and the spread that its own have, in the types that they
    had; norms and biases stay. Raise UnsupportedError for a type that cannot be written."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(None, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":  # which the writer says itself
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data = tensor.data
        if len(tensor.shape) > 1:
            own = gguf.quants.dequantize(data, tensor.tensor_type)
            rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
            drawn = rng.normal(own.mean(), own.std(), own.shape).astype(np.float32)
            try:
                data = gguf.quants.quantize(drawn, tensor.tensor_type)
            except NotImplementedError:
                raise UnsupportedError(f"{tensor.name} is {tensor.tensor_type.name}, which is read only") from None
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    return finish(writer, path)
