"""Tests reused prefixes and runs of tokens: the right rows at the right place, from cells or host memory, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projectors import image_bytes

from notes_cli import config
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import EngineError
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prefix_cache import BLOCK, MOST_STATES, CachedPrefix, Layout, PrefixCache, PrefixStore, Reuse
from notes_cli.runtime.prompt import Prompt, rendered
from notes_cli.runtime.resolve import RUN_SEAM
from notes_cli.runtime.token_runs import SHORTEST, PlacedRun, TextIndex, Texts
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


def raw(cached: Cached, tokens: Tokens) -> Layout:
    return cached.cache.layout(Prompt.raw(tokens))


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
        layout = raw(self, tokens)
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
        states = [block.state for block in blocks if block.state is not None]
        assert sum(part.nbytes for part in (*rows, *ids, *states)) == self.store.nbytes <= self.store.budget
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
        *((kind, ("f16", "f16")) for kind in ("gemma3", "mistral3", "gpt2", "lfm2", "mamba")),
        *(("qwen3", types) for types in (("bf16", "f32"), ("q8_0", "q8_0"), ("q4_0", "q5_1"))),
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
        layout = raw(cached, joined(TEXT, QUESTION))
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
    assert cached.begin(raw(cached, prompt), "b")[1] == cached.begin(raw(cached, prompt))[1] == 0
    assert cached.begin(raw(cached, prompt), "a")[1] == len(TEXT)


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
        assert cached.begin(raw(cached, joined(text, QUESTION[::-1])))[1] == len(text)


def test_the_least_recently_used_end_goes_first(workspace: Workspace) -> None:
    """The budget holds; the beginning of a prefix is dropped last, and is still restored."""
    cached = stored(workspace)
    cached.store.budget = 2 * cached.store.nbytes - 1
    cached.prefill(OTHER)
    cached.evict_all()
    cached.check()
    assert cached.begin(raw(cached, joined(TEXT, QUESTION)))[1] == 2 * BLOCK  # is the more recent one now
    assert cached.begin(raw(cached, joined(OTHER, QUESTION)))[1] == len(OTHER)
    cached.begin(raw(cached, joined(TEXT, QUESTION)))
    third = TEXT[::-1].copy()
    cached.cache.evict_beyond(0)
    cached.prefill(third)
    cached.cache.evict_beyond(0)
    cached.check()
    lengths = [cached.cache._stored(raw(cached, joined(text, QUESTION)), "")[1] for text in (third, TEXT, OTHER)]
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
    assert cached.begin(raw(cached, joined(TEXT, QUESTION)))[1] == (0 if kind == "mamba" else 2 * BLOCK)


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
    assert cached.begin(raw(cached, joined(TEXT, QUESTION)))[1] == 2 * BLOCK


@pytest.mark.parametrize(
    ("kind", "error"),
    [("llama", MemoryError()), ("llama", KeyboardInterrupt()), ("lfm2", EngineError("for this test"))],
)
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

    prompt = raw(cached, joined(TEXT, QUESTION))
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
def test_a_prefix_whose_window_is_gone_is_not_continued(make_model: MakeModel, home: Path, whole: bool) -> None:
    """Nor stored: it is decoded, with the logits of a fresh context; after its end, where the window is, it is
    continued. The control keeps all rows."""
    options = ContextOptions(n_ctx=2048, n_threads=1, swa_full=whole, n_ubatch=64)
    with Workspace(make_model("gemma3"), options) as workspace:
        assert stored(workspace).store.count == (3 if whole else 0)
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
    assert cached.begin(raw(cached, joined(TEXT, QUESTION)))[1] == len(TEXT)
    cached.cache.close()
    cached.prefill(TEXT)
    cached.evict_all()
    workspace.context.resize(n_ctx=8192)
    assert cached.begin(raw(cached, joined(TEXT, QUESTION)))[1] == cached.store.nbytes == 0


def test_a_spliced_skill_is_restored_whole_or_not(workspace: Workspace, skill: Skill) -> None:
    """A prompt with the same skill placed alike continues after it; with another seam, before it."""
    cached = Cached(workspace)
    rules = Skill("rules", "", "Rule: " + "be kind. " * 40, (), "-")
    prompt = Prompt("Why?", [compile_skill(workspace, rules), compile_skill(workspace, skill)], system="Be brief. " * 9)
    layout = cached.cache.layout(rendered(workspace, replace(prompt, seam=4)))
    sequence = run(assemble_task(workspace, layout.prompt))
    sequence.flush()
    entry = cached.cache.add(sequence, layout, "")
    cached.cache.set_idle(entry)
    cached.evict_all()
    asked = replace(prompt, question="When?")
    lengths = []
    for seam in (4, 5):
        other = cached.cache.layout(rendered(workspace, replace(asked, seam=seam)))
        begun, reused = cached.begin(other)
        lengths.append(reused)
        whole = run(assemble_task(workspace, other.prompt, begun=begun))
        assert whole.tokens.tolist() == other.tokens.tolist() and len(whole.logits())
        whole.close()
    (first, middle), (_, last) = layout.splices
    assert lengths[0] >= last and lengths[1] == first
    cached.store._drop(next(iter(cached.store._blocks)))  # the rest ends within the second skill
    reused = cached.begin(cached.cache.layout(rendered(workspace, replace(asked, seam=4))))[1]
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
    layouts = [cached.cache.layout(rendered(seeing, one)) for one in prompts]
    sequence = run(assemble_task(seeing, layouts[0].prompt))
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


PARAGRAPHS = [
    f"Paragraph {number} has the rule that every {word} must be brought back within {13 * number} days, not later."
    for number, word in enumerate(("chair", "table", "lamp", "shelf", "carpet"), 1)
]
BASE = "\n\n".join(PARAGRAPHS)
LINE = "Today is Friday.\n"  # above each of these, so that K/V moves
CHANGED = {  # and the number of paragraphs before the first difference
    "a line above": (LINE + BASE, 5),
    "a word in the middle": (LINE + BASE.replace("lamp", "lantern"), 2),
    "a number": (LINE + BASE.replace("26 days", "27 days"), 1),
    "a negation": (LINE + BASE.replace("lamp must", "lamp must not"), 2),
    "a paragraph removed": (LINE + "\n\n".join(PARAGRAPHS[:1] + PARAGRAPHS[2:]), 1),
    "a line in between": (LINE + BASE.replace("\n\nParagraph 4", "\n\nNothing of this holds.\n\nParagraph 4"), 3),
    "another order": (LINE + "\n\n".join(reversed(PARAGRAPHS)), 1),
    "an edited copy below": (f"{LINE}{PARAGRAPHS[0]}\n\nNow:\n\n{BASE.replace('chair', 'stool')}", 1),
    "other empty lines": (LINE + BASE.replace("\n\n", "  \r\n\r\n", 1), 1),
    "a longer word at its beginning": (f"{LINE}Sub{BASE}", 0),
}


# Finding runs.


def random_tokens(seed: int, count: int, vocabulary: int = 250) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def test_runs_are_the_beginnings_of_texts(make_workspace: MakeWorkspace) -> None:
    """Each begins where a text does, ascends within its span, and ends where the text, the span or equality does."""
    model, random = make_workspace().model, np.random.default_rng(3)
    sources = [
        Texts(random_tokens(4, 500), (0, 100, 300)),
        Texts(random_tokens(5, 300), (7,)),
        Texts(random_tokens(6, 10)),
    ]
    texts = [(source, begin) for source in sources[:2] for begin in source.begins]
    placed = 0
    for _ in range(30):
        parts, wanted = list[Tokens](), list[tuple[int, int]]()
        while sum(map(len, parts)) < 1000:
            source, begin = texts[random.integers(0, len(texts))]
            parts.append(np.array([32, *random_tokens(int(random.integers(9**9)), 20), 32], np.int32))  # between blanks
            first, text = sum(map(len, parts)), source.tokens[begin + random.integers(0, 2) * random.integers(0, 9) :]
            skipped, text = len(source.tokens[begin:]) - len(text), text[: random.integers(1, 250)]
            wanted += [(first, first + len(text))] if len(text) >= SHORTEST and not skipped else []
            parts.append(text)
        tokens, spans = np.concatenate(parts), [(0, 300), (300, 900)]
        runs = TextIndex(model, sources).runs(tokens, spans)
        inside = [
            (first, last)
            for first, last in wanted
            if any(a <= first and first + SHORTEST <= b and last <= b for a, b in spans)
        ]
        assert {*inside} <= {(one.first, one.last) for one in runs}
        for one, after in pairwise([*runs, None]):
            np.testing.assert_array_equal(
                tokens[one.first : one.last], sources[one.source].tokens[one.start : one.start + len(one)]
            )
            assert one.start in sources[one.source].begins
            assert after is None or one.last <= after.first
        placed += len(runs)
        cut = TextIndex(model, sources).runs(tokens, spans, 450)
        assert all(one.first >= 450 for one in cut) and {one for one in runs if one.first >= 450} <= {*cut}
    assert placed > 60


def test_the_longest_and_the_first_source_is_taken(make_workspace: MakeWorkspace) -> None:
    """Of several that have a run, the one that has more of it; of equal ones the first."""
    tokens, model = random_tokens(7, 300), make_workspace().model
    tokens[49] = 32
    index = TextIndex(model, [Texts(tokens[50:150]), Texts(tokens[50:250]), Texts(tokens[50:250])])
    assert [(one.source, one.first, one.last) for one in index.runs(tokens, [(0, 300)])] == [(1, 50, 250)]
    assert TextIndex(model, []).runs(tokens, [(0, 300)]) == []


# Placing them.


class Prompts:
    """Prompts in a workspace with a prefix cache, and compiled texts."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.prefixes = workspace, PrefixCache()
        self.compiled: tuple[Segment, ...] = ()

    def compile(self, text: str = BASE, **how: Any) -> Segment:
        return compile_skill(self.workspace, Skill("rules", "", text, (), "-"), **how)

    def layout(self, system: str, reuse: Reuse = "compiled", question: str = "Why?") -> Layout:
        prompt = Prompt(question, system=system)
        layout = self.prefixes.layout(rendered(self.workspace, prompt))
        return replace(layout, reuse=reuse, compiled=self.compiled)

    def plan(self, layout: Layout, salt: str = "") -> tuple[CachedPrefix | None, int, Layout, list[PlacedRun]]:
        cached, length, _ = self.prefixes.find(layout, salt)
        return cached, length, *self.prefixes.plan(self.workspace, layout, salt, cached, length)

    def assembled(self, layout: Layout, salt: str = "", *, keep: bool = False) -> KVSequence:
        """Assemble a prompt after the longest prefix in the cache. `keep`: as an idle prefix."""
        cached, length, layout, runs = self.plan(layout, salt)
        begun = self.prefixes.begin(cached, length, layout) if cached else self.workspace.sequence()
        sequence = run(assemble_task(self.workspace, layout.prompt, begun=begun, runs=runs))
        assert not runs and sequence.tokens.tolist() == layout.tokens.tolist()
        if keep:
            sequence.logits()
            self.prefixes.set_idle(self.prefixes.add(sequence, layout, salt))
        return sequence

    def prefill(self, layout: Layout) -> KVSequence:
        return run(assemble_task(self.workspace, layout.prompt))


@pytest.fixture
def prompts(make_workspace: MakeWorkspace) -> Iterator[Prompts]:
    """With BASE compiled, and as an idle prefix."""
    with_base = Prompts(make_workspace(n_ctx=4096))
    with_base.assembled(with_base.layout(BASE), keep=True)
    with_base.compiled = (with_base.compile(),)
    yield with_base
    with_base.prefixes.close()


def worst(prompts: Prompts, layout: Layout, sequence: KVSequence) -> tuple[float, float]:
    """The largest error of K and V in the first layer, where no left context counts, and in the last."""
    full = prompts.prefill(layout)
    full.flush()
    sequence.flush()
    count = len(layout)
    ours, theirs = (one.read(0, count, "f32")[0] for one in (sequence, full))
    full.close()
    errors = [max(np.abs(a.k - b.k).max(), np.abs(a.v - b.v).max()) for a, b in zip(ours, theirs, strict=True)]
    return float(errors[0]), float(errors[-1])


@pytest.mark.parametrize("change", CHANGED)
def test_a_text_is_reused_up_to_the_first_difference(prompts: Prompts, change: str) -> None:
    """The K/V of the right tokens at the right positions; a seam is decoded for each run, and unknown tokens."""
    text, same = CHANGED[change]
    layout = prompts.layout(text)
    sequence = prompts.assembled(layout)
    near = [piece for piece in sequence.pieces if piece.reason is Reason.NEAR]
    assert {piece.detail for piece in near} == ({"rules"} if same else set())
    paragraph, reused = len(BASE) // 5, sequence.count("seam") + sum(piece.tokens for piece in near)  # tokens are bytes
    assert same * (paragraph - 4) <= reused <= same * (paragraph + 90)
    seams = [piece.tokens for piece in sequence.pieces if piece.how == "seam"]
    assert seams == [RUN_SEAM] * bool(near)
    assert [piece.position for piece in sequence.pieces] == [
        0,
        *list(accumulate(piece.tokens for piece in sequence.pieces))[:-1],
    ]
    assert sequence.decoded < len(layout) - sum(piece.tokens for piece in near) + 1
    first, last = worst(prompts, layout, sequence)
    assert first < 0.02 and (last > 0.02 or not near), "only later layers depend on it"


@pytest.mark.parametrize("wrong", ["rows", "base"])
def test_the_first_layer_shows_a_wrong_place(prompts: Prompts, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: rows of the tokens before, and keys for the next position, are far off."""
    rows, base = PlacedRun.rows, PlacedRun.base.fget
    if wrong == "rows":
        monkeypatch.setattr(PlacedRun, "rows", lambda one, first: [r.cut(slice(0, -1)) for r in rows(one, first - 1)])
    else:
        monkeypatch.setattr(PlacedRun, "base", property(lambda one: base(one) + 1))
    layout = prompts.layout(CHANGED["a line above"][0])
    assert worst(prompts, layout, prompts.assembled(layout))[0] > 0.2


# Runs that may not be reused.


def test_blocks_are_texts_of_their_own(prompts: Prompts) -> None:
    """Each was compiled by itself, and is placed whatever has changed in the others; within one, up to a difference."""
    prompts.prefixes.close()
    segment = prompts.compile(blocks=5)
    prompts.compiled = (segment,)
    assert len(segment.blocks) == 5
    changed = BASE.replace("26 days", "27 days").replace("carpet must", "carpet may")
    *_, runs = prompts.plan(prompts.layout(changed))
    reused = {token for one in runs for token in range(one.run.start, one.run.start + len(one.run))}
    lost = [[*map(reused.isdisjoint, ([first], [last - 1]))] for first, last in segment.spans]
    assert lost == [[False, False], [False, True], [False, False], [False, False], [False, True]]


@pytest.mark.parametrize("change", ["a line above", "a paragraph removed"])
def test_an_exact_prompt_continues_no_run(prompts: Prompts, change: str) -> None:
    """It has the logits of a prefill, to rounding of other batches, or to the bit; another prompt continues the run."""
    near, exact = prompts.layout(CHANGED[change][0]), prompts.layout(CHANGED[change][0], "exact")
    wanted = prompts.prefill(exact).logits()
    bound = 1e-4 * float(np.abs(wanted).max())
    assert np.abs(prompts.assembled(near, keep=True).logits() - wanted).max() > 10 * bound
    placed = min(piece.position for piece in prompts.prefixes.entries[-1].sequence.pieces if piece.how == "spliced")
    _, length, _, runs = prompts.plan(exact)
    assert length <= placed and not runs
    np.testing.assert_allclose(prompts.assembled(exact).logits(), wanted, atol=bound)
    np.testing.assert_array_equal(prompts.assembled(exact, "other").logits(), wanted)
    again = prompts.assembled(prompts.layout(f"{CHANGED[change][0]}\n\nAnd more."))
    live = [piece for piece in again.pieces if piece.reason is Reason.LIVE and piece.detail]
    assert live and int(live[0].detail) > SHORTEST


def test_a_prompt_that_continues_runs_has_them_for_the_next(prompts: Prompts) -> None:
    """In the same cells: an exact prompt does not continue that one either."""
    text = CHANGED["a line above"][0]
    prompts.assembled(prompts.layout(text), keep=True)
    prompts.prefixes.entries = [one for one in prompts.prefixes.entries if (one.origins < 0).any()]
    longer = f"{text}\n\nAnd more."
    assert prompts.assembled(prompts.layout(longer), keep=True).count("live") > len(text) // 2
    _, length, _, _ = prompts.plan(prompts.layout(longer, "exact"))
    assert length < len(text) // 2


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "gpt2", "lfm2"])
def test_models_whose_rows_cannot_be_moved_decode(make_workspace: MakeWorkspace, kind: str) -> None:
    """Sliding windows that keep all rows can; recurrent states, learned positions and stretches of positions cannot."""
    prompts = Prompts(make_workspace(kind, n_ctx=4096, **({"trained": 4096} if kind == "gpt2" else {})))
    prompts.compiled = (prompts.compile(),)
    layout = prompts.layout(CHANGED["a line above"][0])
    wanted = prompts.prefill(layout).logits()
    sequence = prompts.assembled(layout)
    near = sum(piece.tokens for piece in sequence.pieces if piece.reason is Reason.NEAR)
    if kind == "gemma3":
        assert near > len(layout) / 2 and worst(prompts, layout, sequence)[0] < 0.02
    else:
        assert near < len(layout) / 2  # those of mistral3 may stay within a stretch
        found = sequence.logits()
        assert near or np.allclose(found, wanted, atol=0.02 * float(np.abs(wanted).max()))
    sequence.close()


def kept(cached: Cached, after: list[int]) -> CachedPrefix:
    """TEXT as an idle prefix with recurrent states after so many tokens."""
    sequence = cached.workspace.sequence()
    entry = cached.cache.add(sequence, raw(cached, TEXT), "")
    sequence.append(TEXT)
    sequence.keep_states(after)
    sequence.flush()
    cached.cache.set_idle(entry)
    return entry


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
@pytest.mark.parametrize("evicted", [False, True])
def test_a_prompt_goes_on_at_a_kept_state(make_model: MakeModel, home: Path, kind: str, evicted: bool) -> None:
    """With the logits of a prefill that ends a batch there; also from the store, in blocks that end at the states."""
    with Workspace(make_model(kind), ContextOptions(n_ctx=4096, n_threads=1)) as workspace:
        cached = Cached(workspace)
        kept(cached, [100, 300, 500])
        if evicted:
            cached.evict_all()
            assert [len(block) for block in reversed(cached.store._blocks)] == [100, 200, 200, len(TEXT) - 500]
        for common, state in ((99, 0), (499, 300), (500, 500)):
            prompt = joined(TEXT[:common], QUESTION)
            logits, reused = cached.prefill(prompt)
            assert reused == state
            with workspace.sequence() as fresh:
                fresh.append(prompt)
                fresh.keep_states([100, 300, 500])
                assert np.array_equal(fresh.logits(), logits)
            cached.check()


def test_states_are_bounded(make_model: MakeModel, home: Path) -> None:
    """The states of live sequences take half of the memory at most; the first and the last one are dropped last."""
    with Workspace(make_model("lfm2"), ContextOptions(n_ctx=2048, n_threads=1)) as workspace:
        cached = Cached(workspace)
        states = kept(cached, list(range(20, 600, 20))).sequence.states
        cached.cache.bound_states()
        assert len(states) == MOST_STATES and {20, 580} <= states.keys() and min(states.keys() - {20}) > 280
        size = cached.store.live_bytes // MOST_STATES
        for budget, left in ((7 * size, {20, 560, 580}), (2 * size, {580}), (0, set())):
            cached.store.budget = budget
            cached.cache.bound_states()
            assert states.keys() == left
