"""Asks the prompts of a workload with llama-cpp-python and its LlamaRAMCache, in a process that is measured.

    python -m bench.race.llama_cpp_python FILE

FILE has the workload as JSON. A line of JSON for each answer goes to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, given["package"])
    from llama_cpp import Llama, LlamaRAMCache  # type: ignore[import-not-found]

    options = {"n_threads": given["threads"], "n_threads_batch": given["threads"], "n_ctx": given["context"]}
    llama = Llama(given["model"], **options, verbose=False)
    llama.set_cache(LlamaRAMCache())
    end = float("inf")
    for messages in given["requests"]:
        if time.perf_counter() > end:
            break
        started, before, first, text = time.perf_counter(), time.process_time(), 0.0, ""
        stream = llama.create_chat_completion(messages, max_tokens=given["answer"], temperature=0, stream=True)
        for event in stream:
            text += event["choices"][0]["delta"].get("content") or ""
            first = first or (time.perf_counter() - started if text else 0.0)
        whole, processor = time.perf_counter() - started, time.process_time() - before
        print(json.dumps([first or whole, whole, processor, text.strip()]), flush=True)
        end = min(end, time.perf_counter() + given["seconds"])


if __name__ == "__main__":
    main()
