"""Recognises GGUF files written by Ollama's own converter, by their headers.

Ollama repairs them while loading. llama.cpp refuses most (unknown names, unexpected tensors) and silently misreads
some, whose RoPE scaling or tokenizer has another key.
"""

from __future__ import annotations

from notes_cli.engine.header import Header

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
    sign = _evidence(header)
    return f"in a form of Ollama's own, which llama.cpp refuses or misreads ({sign})" if sign else ""


def _evidence(header: Header) -> str:
    name = header.architecture
    if name in _NAMES:
        return f"architecture {name}, which is {_NAMES[name]} there"
    extra = next((tensor for tensor in header.tensors if tensor.startswith(_EXTRA_TENSORS)), None)
    if extra:
        return f"it holds the tensor {extra}"
    key = next((key for key in (key.format(name) for key in _KEYS.get(name, ())) if key in header.values), None)
    if key:
        return f"it has {key}"
    if name in _REQUIRED and _REQUIRED[name] not in header.values:
        return f"it has no {_REQUIRED[name]}"
    first, last = _TENSORS.get(name, ("", ""))
    if first or last:
        tensor = next((key for key in header.tensors if key.startswith(first) and key.endswith(last)), None)
        if tensor:
            return f"it holds the tensor {tensor}"
    return _special_evidence(name, header)


def _special_evidence(name: str, header: Header) -> str:
    """Return evidence that needs more than a list."""
    tensors, values = header.tensors, header.values
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
