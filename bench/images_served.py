"""Time a repeated image on `notes serve` and on llama.cpp's server, given the same requests in turn.

    python -m bench.images_served [--rounds N] [--model shipped|random] [--out FILE]

Both are given OpenAI's messages, with the picture in a data: URL. What each computes is what it tells (all tokens but
the cached ones; the rows of a picture count as tokens; ours has an empty line between the parts of a message, which are
a few tokens more); the first token is timed by the client. Seconds of a machine that does something else, too, say
little: what counts is their ratio, of medians of requests that alternate. A picture that was never seen is asked about
as well, which is what a compile costs.

`shipped` is the small model that sees. Its eye and decoder are so small that most of what is timed is HTTP, so there is
`random`, too: random weights in the shape of a small model, whose answers are noise, and are not compared.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.processes import Reply, llama_server, notes_serve, stream
from bench.random_model import Shape, random_model
from bench.serving.stock import ROOT, stock
from notes_cli import config
from notes_cli.engine.header import read_header
from notes_cli.engine.vision import MAX_TOKENS_KEY
from training.eye import pictures

sys.path.append(str(ROOT / "tests"))
from projectors import Sizes, write_projector  # type: ignore[import-not-found]

FOLDER = ROOT / "build" / "images"
QUESTIONS = ("What is the total?", "What is the day?")
SERVERS = "llama-server", "notes serve"
SYSTEM = "You work for Harbor Books."
# A decoder of 48 million parameters, and an eye of 24 million: 64 rows for a picture of 224 pixels.
DECODER = Shape("qwen3vl", 12, 512, 8, 4, 64, 1536, 4096, sections=(12, 10, 10, 0))
EYE, PIXELS = Sizes(384, 6, 1536, 12, 14, 224), 224
WAYS = {
    "new": "a picture never seen",
    "again": "the same request again",
    "question": "another question about it",
    "text": "other text before it",
    "picture": "another picture before it",
}

Message = dict[str, Any]


@dataclass(frozen=True)
class Files:
    """Files of the model that is served, and the size of the pictures."""

    name: str
    model: Path
    projector: Path
    pixels: int = 0  # of a side; 0: as they are drawn


def shipped() -> Files:
    """The small model that sees."""
    return Files("shipped", *config.shipped_eye())


def random_files() -> Files:
    """The larger one, with random weights; written once."""
    model = random_model(FOLDER / "qwen3vl-shape.gguf", DECODER, tokenizer=config.shipped_eye()[0])
    projector = FOLDER / "eye-shape.gguf"
    if not projector.exists():
        write_projector(projector, "qwen2vl_merger", DECODER.width, EYE)
    return Files("random", model, projector, PIXELS)


def photo(files: Files, rng: random.Random) -> Message:
    """Return a new picture of a receipt as part of a message."""
    from PIL import Image

    image = Image.fromarray(pictures.draw(pictures.make(rng, "receipt", True), rng))
    if files.pixels:
        image = image.resize((files.pixels, files.pixels))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def messages(system: str, *parts: Message | str) -> list[Message]:
    """The messages of a request."""
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "system", "content": system}, {"role": "user", "content": said}]


def requests(files: Files, way: str, rounds: int) -> Iterator[tuple[bool, list[Message]]]:
    """Yield requests, and True for measured ones; earlier ones show the same pictures."""
    rng = random.Random(f"{files.name} {way}")
    one, others = photo(files, rng), [photo(files, rng) for _ in range(rounds)]
    if way == "new":
        for _ in range(rounds):
            yield True, messages(SYSTEM, photo(files, rng), QUESTIONS[0])
        return
    for shown in (one, *(others if way == "picture" else ())):
        yield False, messages(SYSTEM, shown, QUESTIONS[0])
    for number in range(rounds):
        if way == "again":
            yield number > 0, messages(SYSTEM, one, QUESTIONS[0])
        elif way == "question":
            yield number > 0, messages(SYSTEM, one, QUESTIONS[number % 2])
        elif way == "text":
            yield True, messages(" ".join(rng.sample(pictures.FILLERS, 4)), one, QUESTIONS[0])
        else:
            yield True, messages(SYSTEM, others[number], one, QUESTIONS[0])


def measure(files: Files, rounds: int) -> dict[str, dict[str, float]]:
    """Return by way: tokens, computed tokens, seconds to the first token, number of equal answers."""
    found = {}
    both = ["--mmproj", str(files.projector), "-t", "1"]
    theirs = [*both, "-np", "1", "-c", "2048"]
    if limit := read_header(files.projector).number(MAX_TOKENS_KEY):  # as many rows for a picture as ours
        theirs += ["--image-max-tokens", str(limit)]
    with (
        TemporaryDirectory() as folder,
        notes_serve(files.model, Path(folder), Path(folder) / "serve.log", *both) as here,
        llama_server(stock(), files.model, Path(folder) / "llama-server.log", *theirs) as there,
    ):
        for way in WAYS:
            pairs = []
            for measured, given in requests(files, way, rounds):
                pair = [
                    stream(f"{one.url}/v1/chat/completions", {"messages": given, "max_tokens": 4})
                    for one in (there, here)
                ]
                pairs += [pair] if measured else []
            found[way] = one = {"requests": len(pairs)}
            for server, replies in zip(SERVERS, zip(*pairs, strict=True), strict=True):
                one[f"tokens, {server}"] = median(reply.usage["prompt_tokens"] for reply in replies)
                one[f"computed, {server}"] = median(map(computed, replies))
                one[f"seconds, {server}"] = median(reply.first for reply in replies)
            one["ratio"] = one["seconds, llama-server"] / one["seconds, notes serve"]
            one["same"] = sum(a.text == b.text for a, b in pairs) / len(pairs)
    return found


def computed(reply: Reply) -> int:
    """Tokens of the prompt that were computed for a request."""
    return int(reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"])


def table(name: str, found: dict[str, dict[str, float]]) -> str:
    """Return the table of a model for docs/images.md."""
    lines = [
        f"| {name} | computed, `llama-server` | computed, `notes serve` | first token, ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way, one in found.items():
        computed = (f"{one[f'computed, {who}']:.0f} of {one[f'tokens, {who}']:.0f}" for who in SERVERS)
        lines.append(f"| {WAYS[way]} | {' | '.join(computed)} | {one['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.images_served", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="of each kind (default: %(default)s)")
    parser.add_argument("--model", choices=("shipped", "random"), help="one of them (default: both)")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    every = {"shipped": shipped, "random": random_files}
    found = {}
    for name in [given.model] if given.model else every:
        found[name] = measure(every[name](), given.rounds)
        print(table(name, found[name]))
        same = ", ".join(f"{WAYS[way]} {one['same']:.2f}" for way, one in found[name].items())
        print(f"\nBoth say the same: {same}.\n" if name == "shipped" else "", flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
