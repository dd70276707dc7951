"""Measurements in Python: the API of `notes`, and llama-cpp-python with a state or a cache on disk.

    python -m bench.race.inside KIND FILE

FILE: what is asked, as JSON. Answers go to stdout as they come, for the process that measures this one; of a
conversation, one JSON line a turn.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Given = dict[str, Any]


def api(given: Given) -> None:
    """A question about compiled skills, by `notes`."""
    import notes_cli as notes

    with notes.open(given["model"], notes.ContextOptions(n_ctx=4096, n_threads=given["threads"])) as model:
        changed = {"fields": {"date": given["date"]}, "method": "field"} if given["date"] else {}
        how = {"splice": given["splice"], "system": given["system"] or None, "max_tokens": given["answer"], **changed}
        for text in model.stream(given["question"], **how):
            print(text, end="", flush=True)


def session(given: Given) -> None:
    """Run a conversation in a session of `notes`, and write the text of each prompt to the file `prompts`."""
    import notes_cli as notes

    prompts = []
    with notes.open(given["model"], notes.ContextOptions(n_ctx=4096, n_threads=given["threads"])) as model:
        own = model.workspace.model
        opening = own.tokenize("<|im_start|>assistant\n", special=True).tolist()
        with model.session(given["name"]) as talk:
            for number, turn in enumerate(given["turns"]):
                started, before, first, text = time.perf_counter(), time.process_time(), 0.0, ""
                if number:
                    talk.edit("date", turn["date"], given["method"])
                how = (
                    {}
                    if number
                    else {"splice": given["splice"], "fields": {"date": turn["date"]}, "method": given["method"]}
                )
                for part in talk.stream(turn["question"], max_tokens=given["answer"], **how):  # type: ignore[arg-type]
                    first = first or time.perf_counter() - started
                    text += part
                _tell(text, first, time.perf_counter() - started, time.process_time() - before)
                tokens = list(talk._session.state.tokens)
                end = next(at for at in range(len(tokens), 0, -1) if tokens[at - len(opening) : at] == opening)
                prompt = b"".join(own.token_bytes(token, special=True) for token in tokens[:end]).decode()
                if own.tokenize(prompt, special=True).tolist() != tokens[:end]:
                    raise SystemExit("a prompt of the conversation has other tokens than its text")
                prompts.append({"text": prompt, "tokens": end})
    Path(given["prompts"]).write_text(json.dumps(prompts))


def state(given: Given) -> None:
    """Ask llama-cpp-python with the `save_state` of an earlier prompt, or make that without a file."""
    llama = _llama(given)
    kept = Path(given["kept"])
    if not kept.exists():
        llama.create_completion(_tokens(llama, given["text"]), max_tokens=1, temperature=0)
        kept.write_bytes(pickle.dumps(llama.save_state()))
        return
    llama.load_state(pickle.loads(kept.read_bytes()))
    for text in _answer(llama, given["text"], given["answer"]):
        print(text, end="", flush=True)


def disk(given: Given) -> None:
    """llama-cpp-python with its LlamaDiskCache."""
    from llama_cpp.llama_cache import LlamaDiskCache  # type: ignore[import-not-found]

    llama = _llama(given)
    llama.set_cache(LlamaDiskCache(given["kept"], capacity_bytes=64 << 30))
    for text in _answer(llama, given["text"], given["answer"]):
        print(text, end="", flush=True)


def talk(given: Given) -> None:
    """Run the same conversation in llama-cpp-python, which keeps its KV entries in its context. The prompts are in the
    file `prompts`: they are too long for a command line."""
    llama = _llama(given)
    for turn in json.loads(Path(given["prompts"]).read_text()):
        started, before, first, text = time.perf_counter(), time.process_time(), 0.0, ""
        for part in _answer(llama, turn["text"], given["answer"]):
            first = first or time.perf_counter() - started
            text += part
        _tell(text, first, time.perf_counter() - started, time.process_time() - before)


def _llama(given: Given) -> Any:
    from llama_cpp import Llama

    return Llama(
        *(given["model"],),
        n_ctx=given["context"],
        n_batch=2048,
        n_threads=given["threads"],
        n_threads_batch=given["threads"],
        flash_attn=False,
        verbose=False,
    )


def _tokens(llama: Any, text: str) -> list[int]:
    found: list[int] = llama.tokenize(text.encode(), add_bos=False, special=True)
    return found


def _answer(llama: Any, text: str, limit: int) -> Iterator[str]:
    for chunk in llama.create_completion(_tokens(llama, text), max_tokens=limit, temperature=0, stream=True):
        yield chunk["choices"][0]["text"]


def _tell(text: str, first: float, whole: float, processor: float) -> None:
    found = {"text": text, "first": first or whole, "whole": whole, "processor": processor}
    print(json.dumps(found), flush=True)


KINDS = {"api": api, "session": session, "state": state, "disk": disk, "talk": talk}

if __name__ == "__main__":
    KINDS[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
