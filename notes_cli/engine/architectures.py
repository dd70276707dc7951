"""Forecasts from a GGUF header whether a model's K/V can be spliced, only restored at a prompt's start, or not kept.

An open context is the authority (native/notes_graph.cpp); this lets commands answer without loading the model. The
lists follow the llama.cpp that is built here; docs/architectures.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from notes_cli.engine.header import Header
from notes_cli.engine.ollama_form import ollama_evidence

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


@dataclass(frozen=True, slots=True)
class Skills:
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
