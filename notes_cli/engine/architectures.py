"""Forecasts from a GGUF header whether a model's K/V can be spliced, only restored at a prompt's start, or not kept.

An open context is the authority (native/notes_graph.cpp); this lets commands answer without loading the model. The
lists follow the llama.cpp that is built here; docs/architectures.md has the measurements.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from notes_cli.engine.header import Header

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
