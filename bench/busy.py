"""Time 32 clients of `notes serve` at once on SmolLM2, on an idle machine and beside busy processes, one for each core.

    python -m bench.busy [--rounds 3]

Each client asks a question about one of the sample skills, and gets at most 32 tokens. Prints the median and the 90th
percentile of the time to the first token and to the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.processes import Reply, Server, notes_serve, stream
from bench.real.tasks import SKILLS, load_tasks
from notes_cli.runtime.naming import model_file

CLIENTS, TOKENS = 32, 32
Asked = tuple[str, str]  # a skill and a question about it


def asked() -> list[Asked]:
    questions = [(task.skill, question.ask) for task in load_tasks() for question in task.questions]
    return list(islice(cycle(questions[::3]), CLIENTS))


def answers(server: Server) -> list[Reply]:
    """The answers to all clients, who ask at once."""

    def ask(one: Asked) -> Reply:
        skill, question = one
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": TOKENS, "notes": {"splice": [skill]}}
        return stream(f"{server.url}/v1/chat/completions", body)

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, asked()))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes in the block that compute without end."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = model_file("smollm2")
    with TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        skills = [str(SKILLS / task.skill) for task in load_tasks()]
        environment = {**os.environ, "NOTES_HOME": str(home)}
        command = [sys.executable, "-m", "notes_cli", "compile", "-m", str(model), *skills]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        with notes_serve(model, home, Path(folder) / "log", "--parallel", str(CLIENTS)) as server:
            answers(server)  # opens the skills
            for neighbours in (0, os.cpu_count() or 1):
                with busy(neighbours):
                    found = [one for _ in range(given.rounds) for one in answers(server)]
                times = {"first": [one.first for one in found], "end": [one.whole for one in found]}
                shown = (f"{name} {np.median(some):.2f} {np.percentile(some, 90):.2f}" for name, some in times.items())
                print(f"{neighbours} busy processes: {', '.join(shown)} s (median, 90th percentile)", flush=True)


if __name__ == "__main__":
    main()
