"""A conversation in a session of `notes`, in a process that is measured.

    python -m bench.race.session FILE

FILE has the workload as JSON. A line of JSON a turn goes to stdout as it comes; the text of each prompt goes into the
file `prompts`, for the other peers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import notes_cli as notes


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    options = notes.ContextOptions(n_ctx=4096, n_threads=given["threads"])
    prompts, method = [], given["method"]
    with notes.open(given["model"], options) as model, model.session(method) as session:
        own = model.workspace.model
        opening = own.tokenize("<|im_start|>assistant\n", special=True).tolist()
        for number, (question, date) in enumerate(given["turns"]):
            started, before, first, text = time.perf_counter(), time.process_time(), 0.0, ""
            how: dict[str, Any] = {}
            if number:
                session.edit("date", date, method)
            else:
                how = {"splice": given["splice"], "fields": {"date": date}, "method": method}
            for part in session.stream(question, max_tokens=given["answer"], **how):  # type: ignore[no-untyped-call]
                first = first or time.perf_counter() - started
                text += part
            whole = time.perf_counter() - started
            line = {"text": text, "first": first or whole, "whole": whole, "processor": time.process_time() - before}
            print(json.dumps(line), flush=True)
            tokens = list(session._session.state.tokens)
            end = next(at for at in range(len(tokens), 0, -1) if tokens[at - len(opening) : at] == opening)
            prompt = b"".join(own.token_bytes(token, special=True) for token in tokens[:end]).decode()
            if own.tokenize(prompt, special=True).tolist() != tokens[:end]:
                raise SystemExit("a prompt of the conversation has other tokens than its text")
            prompts.append({"text": prompt, "tokens": end})
    Path(given["prompts"]).write_text(json.dumps(prompts))


if __name__ == "__main__":
    main()
