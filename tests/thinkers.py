"""Chat templates in the forms of reasoning models, reduced to the essentials, and a scripted sampler."""

from __future__ import annotations

from typing import Any

from notes_cli.engine.model import Model

_TALK = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def _answering(opening: str) -> str:
    return _TALK + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}" + opening + "{% endif %}"


SWITCH = _answering(  # as Qwen3: a switch, and the model opens the mark itself
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
OPENED = _answering("{{ '<think>\n' }}")  # as R1: always opened, no switch
UNAWARE = _answering("") + "{# </think> #}"  # as QwQ at first: the template only knows to drop a chain
HARMONY = (  # as gpt-oss: channels
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{# <|channel|>analysis<|message|> #}"
)
RESPONSE = _answering("") + (  # as Granite 3.3: marks around the answer, too
    "{# Write your thoughts between <think></think> and write your response between <response></response> #}"
)
PLAIN = _answering("")  # knows nothing of it


class Scripted:
    """A Sampler that returns the tokens of a text in order, whatever the logits, then an end token. `interrupted`: then
    Ctrl-C."""

    def __init__(self, model: Model, text: str, interrupted: bool = False) -> None:
        self._left = iter([int(token) for token in model.tokenize(text, special=True)])
        self._end = None if interrupted else model.end_tokens[0]

    def __call__(self, *_: object) -> Scripted:
        return self

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def next(self, logits: Any) -> int:
        token = next(self._left, self._end)
        if token is None:
            raise KeyboardInterrupt
        return token

    def likeliest(self, logits: Any) -> int:
        return int(logits.argmax())
