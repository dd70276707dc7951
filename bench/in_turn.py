"""Time two agents that take turns, each with 4,000 tokens, in a context of 6,144, with `--cache-ram` and without.

python -m bench.in_turn MODEL.gguf      (docs/serving.md)
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.processes import notes_serve, stream


def main() -> None:
    for ram in ("0", "2048"):
        with TemporaryDirectory() as folder:
            options = ("-c", "6144", "--cache-ram", ram)
            with notes_serve(Path(sys.argv[1]), Path(folder) / "home", Path(folder) / "log", *options) as server:
                agents = [[{"role": "system", "content": f"{name} is well. " * 1000}] for name in ("Ada", "Bob")]
                for turn in range(2):
                    for turns in agents:
                        turns.append({"role": "user", "content": f"How is everyone at {turn} o'clock?"})
                        reply = stream(f"{server.url}/v1/chat/completions", {"messages": turns, "max_tokens": 16})
                        turns.append({"role": "assistant", "content": reply.text})
                        decoded = reply.usage["prompt_tokens_details"]["notes"]["decoded_tokens"]
                        print(f"{ram} MiB, turn {turn}: {decoded} decoded, {reply.first:.2f} s", flush=True)


if __name__ == "__main__":
    main()
