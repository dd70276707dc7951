"""Tests evicted prefixes in host memory: they come back bit for bit, within a budget, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projectors import image_bytes

from notes_cli import config
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Tokens
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import EngineError
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prefix_cache import Layout, PrefixCache
from notes_cli.runtime.prefix_store import BLOCK, PrefixStore
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill

from ..conftest import MakeModel, MakeWorkspace

PLENTY = 1 << 30
random = np.random.default_rng(5)
TEXT, OTHER = (random.integers(30, 90, 2 * BLOCK + 88).astype(np.int32) for _ in range(2))
QUESTION = np.arange(40, 60, dtype=np.int32)


def joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def bits(sequence: KVSequence, count: int) -> list[bytes]:
    """The bytes of its first rows, in full precision."""
    return [part.tobytes() for layer in sequence.read(0, count, "f32")[0] for part in (layer.k, layer.v)]


class Cached:
    """A prefix cache with a store, and prompts that are decoded as they are."""

    def __init__(self, workspace: Workspace, budget: int = PLENTY) -> None:
        self.workspace = workspace
        self.store = PrefixStore(workspace, budget)
        self.cache = PrefixCache(self.store)

    def begin(self, layout: Layout, salt: str = "") -> tuple[KVSequence, int]:
        """Return a sequence that begins with the reusable prefix, and its length, as the scheduler makes it."""
        cached, length, _ = self.cache.find(layout, salt)
        if cached and length:
            sequence = self.cache.begin(cached, length, layout, fork=True)
        else:
            sequence = self.workspace.sequence()
        return sequence, self.cache.restore(sequence, layout, salt)

    def prefill(self, tokens: Tokens, salt: str = "") -> tuple[np.ndarray, int]:
        """Return the logits after these tokens, and the number of reused ones. The sequence becomes idle."""
        layout = self.cache.raw(tokens)
        sequence, reused = self.begin(layout, salt)
        cached = self.cache.add(sequence, layout, salt)
        sequence.append(tokens[reused:])
        logits = sequence.logits()
        self.cache.set_idle(cached)
        return logits, reused

    def evict_all(self) -> None:
        self.cache.evict_beyond(0)
        assert not self.workspace.context.used

    def check(self) -> None:
        """The store counts the bytes that it holds, and no more than it may."""
        blocks = list(self.store._blocks)
        rows = [part for block in blocks for layer in block.segment.layers for part in (layer.k, layer.v)]
        ids = [part for block in blocks for part in (block.segment.tokens, block.origins)]
        assert sum(part.nbytes for part in (*rows, *ids)) == self.store.nbytes <= self.store.budget
        assert all(block in block.siblings for block in blocks)


def stored(workspace: Workspace) -> Cached:
    """A cache with TEXT in its store alone."""
    cached = Cached(workspace)
    cached.prefill(TEXT)
    cached.evict_all()
    return cached


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        *((kind, ("f16", "f16")) for kind in ("llama", "qwen3", "gemma3", "phi3", "mistral3", "gpt2", "lfm2", "mamba")),
        *(("qwen3", types) for types in (("f32", "f32"), ("bf16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q5_1"))),
        ("lfm2", ("q8_0", "q8_0")),
    ],
)
def test_restored_rows_are_the_same_bits(make_model: MakeModel, home: Path, kind: str, types: tuple[str, str]) -> None:
    """So are the logits after them. Recurrent state is restored, too. The control: another text's are others."""
    options = ContextOptions(n_ctx=2048, n_threads=1, type_k=types[0], type_v=types[1])
    settings = {"embd": 128} if kind == "lfm2" else {}  # heads that a cache of q8_0 can hold
    with Workspace(make_model(kind, name="tiny", **settings), options) as workspace:
        cached = Cached(workspace)
        cached.prefill(TEXT)
        layout = cached.cache.raw(joined(TEXT, QUESTION))
        live, reused = cached.begin(layout)
        assert reused == len(TEXT) and not cached.store.hits
        rows = bits(live, reused)
        live.append(QUESTION)
        wanted = live.logits()
        live.close()
        cached.evict_all()
        restored, reused = cached.begin(layout)
        assert (reused, cached.store.hits, cached.store.restored) == (len(TEXT), 1, len(TEXT))
        assert bits(restored, reused) == rows
        restored.append(QUESTION)
        assert np.array_equal(restored.logits(), wanted) and restored.count("live") == len(TEXT)
        restored.close()
        control, _ = cached.prefill(joined(OTHER, QUESTION))
        assert not np.array_equal(control, wanted)
        cached.check()


def test_the_rest_of_a_prefix_is_restored_after_its_live_part(workspace: Workspace) -> None:
    """A prompt that begins with a part of both gets the live part, the stored one, and decodes the rest."""
    cached = stored(workspace)
    cached.prefill(TEXT[:100])
    before = cached.store.restored
    prompt = joined(TEXT[:400], QUESTION)
    found, reused = cached.prefill(prompt)
    assert (reused, cached.store.restored - before) == (400, 300)
    with workspace.sequence() as fresh:
        fresh.append(prompt)
        wanted = fresh.logits()
    assert float(found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)) > 0.9999


def test_a_live_prefix_is_preferred(workspace: Workspace) -> None:
    """A few more stored tokens are not worth a restore either."""
    cached = Cached(workspace)
    cached.prefill(joined(TEXT, QUESTION[:4]))
    cached.evict_all()
    cached.prefill(TEXT, "other")
    cached.cache.entries[0].salt = ""
    _, reused = cached.prefill(joined(TEXT, QUESTION))
    assert (reused, cached.store.hits) == (len(TEXT), 0)


def test_a_longer_state_is_preferred_to_a_live_one(make_workspace: MakeWorkspace) -> None:
    """It is restored in a sequence of its own, as it cannot follow another one."""
    cached = stored(make_workspace("lfm2"))
    assert cached.prefill(TEXT[:300])[1] == 0  # a state is of all of its tokens
    assert cached.prefill(joined(TEXT, QUESTION))[1] == len(TEXT)


def test_salts_are_kept_apart(workspace: Workspace) -> None:
    cached = Cached(workspace)
    cached.prefill(TEXT, "a")
    cached.evict_all()
    prompt = joined(TEXT, QUESTION)
    assert cached.begin(cached.cache.raw(prompt), "b")[1] == cached.begin(cached.cache.raw(prompt))[1] == 0
    assert cached.begin(cached.cache.raw(prompt), "a")[1] == len(TEXT)


def test_prefixes_share_the_blocks_in_which_they_are_equal(workspace: Workspace) -> None:
    """A longer prefix takes the place of a shorter one, and a shorter one takes none."""
    cached = stored(workspace)
    assert cached.store.count == 3
    alone = cached.store.nbytes
    cached.prefill(joined(TEXT, QUESTION))
    cached.evict_all()
    assert cached.store.count == 3  # the last block is longer
    cached.prefill(TEXT[: 2 * BLOCK + 9])
    cached.evict_all()
    assert cached.store.count == 3 and alone < cached.store.nbytes < 1.05 * alone
    cached.prefill(joined(TEXT[: BLOCK + 9], OTHER[:BLOCK]))
    cached.evict_all()
    assert cached.store.count == 5  # and the first is shared
    cached.check()
    for text in (TEXT, joined(TEXT[: BLOCK + 9], OTHER[:BLOCK])):
        assert cached.begin(cached.cache.raw(joined(text, QUESTION[::-1])))[1] == len(text)


def test_the_least_recently_used_end_goes_first(workspace: Workspace) -> None:
    """The budget holds; the beginning of a prefix is dropped last, and is still restored."""
    cached = stored(workspace)
    cached.store.budget = 2 * cached.store.nbytes - 1
    cached.prefill(OTHER)
    cached.evict_all()
    cached.check()
    assert cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))[1] == 2 * BLOCK  # is the more recent one now
    assert cached.begin(cached.cache.raw(joined(OTHER, QUESTION)))[1] == len(OTHER)
    cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))
    third = TEXT[::-1].copy()
    cached.cache.evict_beyond(0)
    cached.prefill(third)
    cached.cache.evict_beyond(0)
    cached.check()
    lengths = [cached.cache._stored(cached.cache.raw(joined(text, QUESTION)), "")[1] for text in (third, TEXT, OTHER)]
    assert lengths == [len(third), 2 * BLOCK, 0]


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_a_budget_that_is_too_small(make_workspace: MakeWorkspace, kind: str) -> None:
    """Attention's rows are kept as far as they fit, a state not at all."""
    workspace = make_workspace(kind)
    cached = stored(workspace)
    cached.store.budget = cached.store.nbytes - 1
    cached.store.clear()
    cached.prefill(TEXT)
    cached.evict_all()
    cached.check()
    assert cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))[1] == (0 if kind == "mamba" else 2 * BLOCK)


@pytest.mark.parametrize("error", [EngineError("for this test"), MemoryError()])
def test_a_failed_save_keeps_the_rest(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The blocks before the failure are complete, and the prefix is evicted as without a store."""
    cached, calls, read = Cached(workspace), 0, Context.read

    def failing(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return read(*args, **how)

    cached.prefill(TEXT)
    monkeypatch.setattr(Context, "read", failing)
    cached.evict_all()
    cached.check()
    assert cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))[1] == 2 * BLOCK


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.parametrize("error", [EngineError("for this test"), MemoryError(), KeyboardInterrupt()])
def test_a_failed_restore_leaves_nothing_half_filled(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException
) -> None:
    """The prompt is decoded instead, from its live prefix on; the rows are still in the store."""
    cached, calls, splice = Cached(make_workspace(kind)), 0, Context.splice

    def failing(*args: Any, **how: Any) -> None:
        nonlocal calls
        splice(*args, **how)
        calls += 1
        if calls == (1 if kind == "lfm2" else 2):
            raise error

    prompt = cached.cache.raw(joined(TEXT, QUESTION))
    cached.prefill(TEXT)
    cached.evict_all()
    live = 0 if kind == "lfm2" else 100
    if live:
        cached.prefill(TEXT[:live])
    hits = cached.store.hits
    with monkeypatch.context() as patch:
        patch.setattr(Context, "splice", failing)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                cached.begin(prompt)
        else:
            sequence, reused = cached.begin(prompt)
            assert (reused, len(sequence), sequence.rows, sequence.intact) == (live, live, live, True)
            assert sequence.count("live") == live and cached.store.hits == hits
            sequence.close()
    assert cached.begin(prompt)[1] == len(TEXT)


@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_left_a_window_are_not_stored(make_model: MakeModel, home: Path, whole: bool) -> None:
    """The control keeps all rows."""
    with Workspace(make_model("gemma3"), ContextOptions(n_ctx=2048, n_threads=1, swa_full=whole)) as workspace:
        cached = stored(workspace)
        assert cached.store.count == (3 if whole else 0)


@pytest.mark.parametrize("whole", [True, False])
def test_a_prefix_whose_window_is_gone_is_not_continued(make_model: MakeModel, home: Path, whole: bool) -> None:
    """It is decoded, with the logits of a fresh context; after its end, where the window is, it is continued."""
    options = ContextOptions(n_ctx=2048, n_threads=1, swa_full=whole, n_ubatch=64)
    with Workspace(make_model("gemma3"), options) as workspace:
        cached = Cached(workspace)
        cached.prefill(TEXT)
        for length, expected in ((200, 200 if whole else 0), (len(TEXT), len(TEXT))):
            prompt = joined(TEXT[:length], QUESTION)
            logits, reused = cached.prefill(prompt)
            assert reused == expected
            with workspace.sequence() as fresh:
                fresh.append(prompt)
                wanted = fresh.logits()
            assert float(logits @ wanted / np.linalg.norm(logits) / np.linalg.norm(wanted)) > 0.9999


def test_rows_of_another_rotation_are_dropped(make_workspace: MakeWorkspace) -> None:
    """LongRoPE rotates otherwise in a larger context: rows of the smaller one would be silently wrong."""
    workspace = make_workspace("phi3", n_ctx=1024, name="long")
    cached = stored(workspace)
    workspace.context.resize(n_ctx=2048)
    assert cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))[1] == len(TEXT)
    cached.cache.close()
    cached.prefill(TEXT)
    cached.evict_all()
    workspace.context.resize(n_ctx=8192)
    assert cached.begin(cached.cache.raw(joined(TEXT, QUESTION)))[1] == cached.store.nbytes == 0


def test_a_spliced_skill_is_restored_whole_or_not(workspace: Workspace, skill: Skill) -> None:
    """A prompt with the same skill placed alike continues after it; with another seam, before it."""
    cached = Cached(workspace)
    rules = Skill("rules", "", "Rule: " + "be kind. " * 40, (), "-")
    prompt = Prompt("Why?", [compile_skill(workspace, rules), compile_skill(workspace, skill)], system="Be brief. " * 9)
    parts = parts_of(workspace, prompt)
    layout = cached.cache.layout(prompt, parts, 4)
    sequence = run(assemble_task(workspace, prompt, parts, seam=4))
    sequence.flush()
    entry = cached.cache.add(sequence, layout, "")
    cached.cache.set_idle(entry)
    cached.evict_all()
    asked = replace(prompt, question="When?")
    lengths = []
    for seam in (4, 5):
        other = cached.cache.layout(asked, parts_of(workspace, asked), seam)
        begun, reused = cached.begin(other)
        lengths.append(reused)
        whole = run(assemble_task(workspace, asked, parts_of(workspace, asked), seam=seam, begun=begun))
        assert whole.tokens.tolist() == other.tokens.tolist() and len(whole.logits())
        whole.close()
    (first, middle), (_, last) = layout.splices
    assert lengths[0] >= last and lengths[1] == first
    cached.store._drop(next(iter(cached.store._blocks)))  # the rest ends within the second skill
    reused = cached.begin(cached.cache.layout(asked, parts_of(workspace, asked), 4))[1]
    assert reused == middle < 2 * BLOCK < last


@pytest.fixture
def seeing(home: Path) -> Iterator[Workspace]:
    model, projector = config.shipped_eye()
    with Workspace(model, ContextOptions(n_ctx=1024, n_threads=1), projector=projector) as workspace:
        yield workspace


def test_images_are_restored_as_a_whole(seeing: Workspace, tmp_path: Path) -> None:
    """Rows that share positions come back at these, and only for the same image."""
    cached, images = Cached(seeing), []
    for seed in (1, 2):
        path = tmp_path / f"photo-{seed}.png"
        path.write_bytes(image_bytes(48, 48, seed=seed))
        images.append(replace(compile_skill(seeing, load_skill(path)), name="photo"))
    prompts = [Prompt("What is it? " * 30, [image], system="Be brief. " * 24) for image in images]
    layouts = [cached.cache.layout(one, parts_of(seeing, one), 1) for one in prompts]
    sequence = run(assemble_task(seeing, prompts[0], layouts[0].parts, seam=1))
    sequence.flush()
    assert sequence.images and len(sequence) > BLOCK
    cached.cache.set_idle(cached.cache.add(sequence, layouts[0], ""))
    live, length = cached.begin(layouts[0])
    live.append(layouts[0].tokens[length:])
    wanted, placed = live.logits(), live.images
    live.close()
    cached.evict_all()
    restored, reused = cached.begin(layouts[0])
    assert reused == length > placed[0].last and restored.images == placed
    restored.append(layouts[0].tokens[reused:])
    assert np.array_equal(restored.logits(), wanted)
    restored.close()
    assert cached.begin(layouts[1])[1] == layouts[1].splices[0][0]
    cached.check()
