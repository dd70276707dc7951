"""What `notes ask --splice` takes as a process of its own beyond loading the weights and reading the question.

    python -m bench.cold [--sections 9] [--repeat 5] [--threads N]

Two processes take turns, with a random model in the shape of Qwen3-0.6B: `notes ask` of one token, and one that maps
the weights, decodes as many tokens as `notes ask` does, after rows that are there, and unmaps the weights (the times of
these three alone count). The tokens are those of the prompt, and the answer's, after which `notes` looks whether it has
ended. Medians, in milliseconds of the clock and of the processor. A third process is `notes ask` whose parts are timed,
so that it tells what the rest consists of. Also `notes --help`. Exits 1 beyond the bars.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.processes import Ended, watched

BARS = {"ask": 150, "help": 80}  # milliseconds of the processor
NOTES = (str(Path(sys.executable).with_name("notes")),)  # as a user starts it
DECODED = 18  # tokens of the opening, the question and the cue
Took = tuple[float, float]  # seconds of the clock and of the processor


def bare(model: Path, tokens: int, threads: int) -> None:
    """Print how long the weights, there and back, and the question take."""
    import numpy as np

    from bench.speed import make_segment, random_rows
    from notes_cli.engine.context import Context
    from notes_cli.engine.model import Model
    from notes_cli.engine.notebook import Notebook
    from notes_cli.engine.options import ContextOptions

    clock, processor = time.perf_counter(), time.process_time()
    loaded = Model(model, gpu_layers=0)
    load = time.perf_counter() - clock, time.process_time() - processor
    context = Context(loaded, ContextOptions(n_ctx=max(4096, tokens + 256), n_threads=threads))
    notebook = Notebook(context)
    notebook.splice(make_segment(context, np.zeros(tokens, np.int32), random_rows(context, tokens)))
    clock, processor = time.perf_counter(), time.process_time()
    notebook.append(np.arange(5, 5 + DECODED))
    notebook.logits()
    notebook.append([4])
    notebook.logits()
    asked = time.perf_counter() - clock, time.process_time() - processor
    context.close()
    clock, processor = time.perf_counter(), time.process_time()
    loaded.close()
    back = time.perf_counter() - clock, time.process_time() - processor
    print(json.dumps([sum(times) for times in zip(load, asked, back, strict=True)]))


def parts_of(done: Ended, log: Path) -> dict[str, float]:
    """Seconds by part, the end of the process among them."""
    told = json.loads(log.read_text().splitlines()[-1])
    return {**told["parts"], "its end": done.processor - told["whole"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=int, default=9, help="of the policy: 9 are 3,900 tokens, 2 are 930")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as notes: threads that turn in circles would count as bare
    from bench.random_model import with_words_of
    from bench.serving.texts import policy
    from notes_cli.config import shipped_model

    model = with_words_of(shipped_model())
    if given.bare:
        bare(model, given.bare, given.threads)
        return 0
    with tempfile.TemporaryDirectory() as home:
        unset = ("NOTES_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "PYTHONDONTWRITEBYTECODE")
        log, own = Path(home) / "log", {**dict.fromkeys(unset, ""), "HOME": home, "NOTES_MODEL": str(model)}
        (text := Path(home) / "policy.txt").write_text(policy(sections=given.sections))
        command = [*NOTES, "compile", str(text), "--json", "-t", str(given.threads)]
        compiled = subprocess.run(command, env={**os.environ, **own}, capture_output=True, check=True)
        tokens = json.loads(compiled.stdout)["compiled"][0]["tokens"]
        ask = ["ask", "What is the return?", "--splice", "policy", "-n", "1", "--server", "off"]
        ask += ["-t", str(given.threads)]
        again = [sys.executable, "-m", "bench.cold", "--bare", str(tokens), "--threads", str(given.threads)]
        timed = [sys.executable, "-m", "bench.cold_parts", *ask]
        watched([*NOTES, *ask], log, own)  # what it remembers from then on
        found: dict[str, list[Took]] = {"ask": [], "bare": [], "help": []}
        inside: list[dict[str, float]] = []
        for _ in range(given.repeat):
            done = watched([*NOTES, *ask], log, own)
            found["ask"].append((done.whole, done.processor))
            clock, processor = json.loads(watched(again, log).out)
            found["bare"].append((clock, processor))
            inside.append(parts_of(watched(timed, log, own), log))
            done = watched([*NOTES, "--help"], log)
            found["help"].append((done.whole, done.processor))
    beyond = [(ask[0] - bare[0], ask[1] - bare[1]) for ask, bare in zip(found["ask"], found["bare"], strict=True)]
    print(f"{tokens} tokens, {given.threads} threads, medians of {given.repeat}: ms of the clock (of the processor)")
    for name, times in {**found, "ask beyond bare": beyond}.items():
        clock, processor = (1000 * median(one[i] for one in times) for i in (0, 1))
        print(f"  {name}: {clock:.0f} ({processor:.0f})")
    print("notes ask by its parts, ms of the processor:")
    for name in inside[0]:
        print(f"  {name}: {1000 * median(one[name] for one in inside):.0f}")
    over = [1000 * median(one[1] for one in times) for times in (beyond, found["help"])]
    return int(any(took > bar for took, bar in zip(over, BARS.values(), strict=True)))


if __name__ == "__main__":
    sys.exit(main())
