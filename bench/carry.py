"""Carrying a recurrent state through a segment: how exact it is, and what it costs.

    python -m bench.carry exact [--most 5000]     one layer of every recurrence, at many lengths
    python -m bench.carry speed [--tokens 4096]   a model in the shape of Qwen 3.5 0.8B

`exact` tells the largest error and the smallest one of the controls, which must be off: it exits 1 where an error is
not below the bound of tests/engine/test_carry.py, whose models these are, or a control not above a thousand times
that. `speed` times a carried segment and a prefill of a part of its tokens: attention makes one of all dearer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from bench.random_model import Q8_0, ROOT, finish, random_blocks
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
import test_carry as ours  # type: ignore[import-not-found]
from tiny import write_tokenizer  # type: ignore[import-not-found]

LENGTHS = (1, 2, 3, 5, 16, 64, 333, 1000, 5000)
LEFT = 200  # tokens before the segment, of which it has seen none
SHAPE = ROOT / "build" / "bench" / "qwen3.5-0.8b-shape.gguf"


def exact(most: int) -> int:
    """A line a model: errors over all lengths."""
    print(f"{'model':<16} {'largest error':>14} {'smallest of a control, to 64 tokens':>36}  lengths")
    failed = False
    for name in ours.ALL:
        with tempfile.TemporaryDirectory() as folder, Model(ours.made(name, Path(folder))) as model:
            lengths = [length for length in LENGTHS if length <= most and (length < 1000 or name in ours.EACH)]
            worst, controls = 0.0, []
            for length in lengths:
                room = {"n_ctx": 512 + LEFT + length, "n_ubatch": 512}
                with ours.opened(model, **room) as context:
                    tokens = ours.text(model, length, sum(context.margins) + length)
                    found = ours.compiled(context, ours.text(model, 2, 5), tokens)
                left = ours.text(model, 3, LEFT)
                worst = max(worst, ours.error(model, left, tokens, found, **room))
                if 16 <= length <= 64 and any(len(one.b) for one in found.transitions):
                    for control in ours.CONTROLS.values():
                        wrong = replace(found, transitions=tuple(map(control, found.transitions)))
                        controls.append(ours.error(model, left, tokens, wrong, **room))
        least = min(controls, default=None)
        failed |= worst >= ours.BOUND or (least is not None and least <= 1000 * ours.BOUND)
        told = "no state" if least is None else f"{least:.0e}"
        print(f"{name:<16} {worst:>14.0e} {told:>36}  {', '.join(map(str, lengths))}", flush=True)
    return int(failed)


def shaped(path: Path = SHAPE) -> Path:
    """Qwen 3.5 0.8B but for its vocabulary, which is bytes: 24 layers, of which every fourth has attention."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    random, layers, width, feed = np.random.default_rng(0), 24, 1024, 3584
    heads, kv_heads, head, state, groups = 8, 2, 256, 128, 16
    writer = gguf.GGUFWriter(None, "qwen35")
    numbers = {
        "context_length": 32768, "embedding_length": width, "block_count": layers, "feed_forward_length": feed,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head,
        "attention.value_length": head, "rope.dimension_count": head // 4, "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.state_size": state, "ssm.group_count": groups, "ssm.time_step_rank": groups,
        "ssm.inner_size": state * groups,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32("qwen35.rope.freq_base", 1e7)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_file_type(7)
    vocabulary = write_tokenizer(writer)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(random, rows, columns), raw_dtype=Q8_0)

    def ones(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, np.float32))

    matrix("token_embd", vocabulary, width)
    ones("output_norm.weight", width)
    for i in range(layers):
        for name in ("attn_norm", "post_attention_norm"):
            ones(f"blk.{i}.{name}.weight", width)
        if (i + 1) % 4:
            inner = state * groups
            matrix(f"blk.{i}.attn_qkv", 3 * inner, width)
            matrix(f"blk.{i}.attn_gate", inner, width)
            writer.add_tensor(f"blk.{i}.ssm_conv1d.weight", random.normal(0, 0.5, (3 * inner, 4)).astype(np.float32))
            ones(f"blk.{i}.ssm_dt.bias", groups)
            writer.add_tensor(f"blk.{i}.ssm_a", np.full(groups, -0.02, np.float32))
            matrix(f"blk.{i}.ssm_beta", groups, width)
            matrix(f"blk.{i}.ssm_alpha", groups, width)
            ones(f"blk.{i}.ssm_norm.weight", state)
            matrix(f"blk.{i}.ssm_out", width, inner)
        else:
            matrix(f"blk.{i}.attn_q", 2 * heads * head, width)
            matrix(f"blk.{i}.attn_k", kv_heads * head, width)
            matrix(f"blk.{i}.attn_v", kv_heads * head, width)
            matrix(f"blk.{i}.attn_output", width, heads * head)
            ones(f"blk.{i}.attn_q_norm.weight", head)
            ones(f"blk.{i}.attn_k_norm.weight", head)
        matrix(f"blk.{i}.ffn_gate", feed, width)
        matrix(f"blk.{i}.ffn_up", feed, width)
        matrix(f"blk.{i}.ffn_down", width, feed)
    return finish(writer, path)


def speed(tokens: int, part: int) -> int:
    """Times of one process on one thread."""
    with Model(shaped()) as model, Context(model, ContextOptions(tokens + 512, 512, 512, 1)) as context:
        seam, ids = 16, ours.text(model, 1, part)
        context.append({0: ids[:seam]}, "none")
        context.append({0: ids}, "none")  # once, so that memory is there
        started = time.perf_counter()
        context.append({0: ids}, "none")
        plain = time.perf_counter() - started
        with context.capturing(0) as captured:
            started = time.perf_counter()
            context.append({0: ids}, "none")
            capturing = time.perf_counter() - started
            transitions = captured()
        length = context.length(0)
        rows = context.read(0, 0, length, base=0)
        context.clear()
        # What the rows hold does not matter here: those that there are, again and again.
        again = [one if one.part == "state" else replace(one, k=np.resize(one.k, (tokens, one.k.shape[1])),
                 v=np.resize(one.v, (tokens, one.v.shape[1]))) for one in rows]  # fmt: skip
        words = np.resize(ids, tokens).astype(np.int32)
        times = []
        for number in range(4):
            context.append({0: ids[: seam + number]}, "none")
            started = time.perf_counter()
            context.carry(0, seam + number, words, again, transitions, 0)
            times.append(time.perf_counter() - started)
            context.clear()
        started = time.perf_counter()
        context.append({0: ids[:seam]}, "none")
        decoding = time.perf_counter() - started
    carry, rate = min(times), part / plain
    kept = sum(one.k.nbytes + one.v.nbytes for one in again if one.part != "state")
    states = sum(one.k.nbytes + one.v.nbytes for one in again if one.part == "state")
    moved = sum(one.nbytes for one in transitions)
    print(f"prefill: {rate:.0f} tokens a second ({part} tokens); capturing takes {capturing / plain - 1:+.1%}")
    print(f"carrying {tokens} tokens: {1000 * carry:.0f} ms, and {1000 * decoding:.0f} ms for a seam of {seam}")
    print(f"a prefill of {tokens} at that rate: {tokens / rate:.1f} s, {tokens / rate / (carry + decoding):.0f} times")
    print(f"bytes: rows {kept / 2**20:.1f} MiB, states {states / 2**20:.1f} MiB, transitions {moved / 2**20:.1f} MiB")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("--most", type=int, default=LENGTHS[-1], help="tokens of the longest segment")
    parser.add_argument("--tokens", type=int, default=4096, help="that are carried")
    parser.add_argument("--part", type=int, default=256, help="tokens of the prefill that is timed")
    given = parser.parse_args()
    return exact(given.most) if given.what == "exact" else speed(given.tokens, given.part)


if __name__ == "__main__":
    sys.exit(main())
