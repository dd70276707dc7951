"""Models that Ollama's own converter wrote, by what is in their heads.

Ollama repairs these while it loads them. llama.cpp itself refuses most of them (names that it does not know, tensors
that it does not expect) and misreads some in silence: a RoPE scaling or a tokenizer is named otherwise, and ignored.
"""

from __future__ import annotations

from notes_cli.engine.header import Header

# What llama.cpp calls the architecture, or has instead of it.
_NAMES = {
    "deepseekocr": "deepseek2-ocr",
    "glm4moelite": "deepseek2",
    "glmocr": "glm4",
    "gptoss": "gpt-oss",
    "nemotron_h_omni": "nemotron_h_moe",
    "olmo3": "olmo2",
    "qwen25vl": "qwen2vl",
}

# Tensors of what sees, hears or drafts: llama.cpp wants these in files of their own.
_BESIDE = ("v.", "a.", "mm.", "mtp.", "model.vision_tower.")

# Keys that llama.cpp's converter does not write, {} being the architecture.
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

# Keys that llama.cpp cannot do without.
_WANTED = {
    "gemma3": "gemma3.attention.layer_norm_rms_epsilon",
    "qwen3vl": "qwen3vl.rope.dimension_sections",
    "qwen3vlmoe": "qwen3vlmoe.rope.dimension_sections",
}

# How tensors begin or end that llama.cpp calls otherwise.
_TENSORS = {
    "gemma3": ("dense.0.weight", ""),
    "laguna": ("blk.0.attn_g.weight", ""),
    "nemotron_h_moe": ("blk.", ".ffn_latent_in.weight"),
    "qwen3next": ("", ".ssm_dt"),
}

_LLAMA3_TOKENS = 128256

ADVICE = "Take a GGUF of this model that was made for llama.cpp, as those on Hugging Face are"


def ollama_evidence(header: Header) -> str:
    """What to say of a model in Ollama's form, with what shows it; "" of any other."""
    sign = _sign(header)
    return f"in a form of Ollama's own, which llama.cpp refuses or misreads ({sign})" if sign else ""


def _sign(header: Header) -> str:
    name = header.architecture
    if name in _NAMES:
        return f"architecture {name}, which is {_NAMES[name]} there"
    beside = next((tensor for tensor in header.tensors if tensor.startswith(_BESIDE)), None)
    if beside:
        return f"it holds the tensor {beside}"
    key = next((key for key in (key.format(name) for key in _KEYS.get(name, ())) if key in header.values), None)
    if key:
        return f"it has {key}"
    if name in _WANTED and _WANTED[name] not in header.values:
        return f"it has no {_WANTED[name]}"
    first, last = _TENSORS.get(name, ("", ""))
    if first or last:
        tensor = next((one for one in header.tensors if one.startswith(first) and one.endswith(last)), None)
        if tensor:
            return f"it holds the tensor {tensor}"
    return _sign_of_its_own(name, header)


def _sign_of_its_own(name: str, header: Header) -> str:
    """What no list can say."""
    tensors, values = header.tensors, header.values
    if name == "lfm2" and "output_norm.weight" in tensors and "token_embd_norm.weight" not in tensors:
        return "its last norm is called output_norm"
    if name == "gemma3n":
        words, layers = (tensors.get(f"{one}.weight", ()) for one in ("token_embd", "per_layer_token_embd"))
        if words and layers and words[1:2] != layers[1:2]:
            return "its embeddings are of two vocabularies"
    if name == "gemma4" and header.text("tokenizer.ggml.model") == "llama":
        return "its tokenizer is called llama"
    llama3 = name == "llama" and values.get("tokenizer.ggml.tokens") == _LLAMA3_TOKENS
    llama3 = llama3 and "<|start_header_id|>" in header.text("tokenizer.chat_template")
    if llama3 and header.text("tokenizer.ggml.pre") in ("", "default"):
        return "a tokenizer of Llama 3 that is not named so"
    return ""
