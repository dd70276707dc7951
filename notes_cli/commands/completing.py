"""Answers a shell that asks what may come next, as the script of `notes completion bash` asks: by the line as typed."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, add_completion_class, split_arg_string


class Bash(BashComplete):
    """The words of the line up to the cursor, however bash would break them."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        open_ = bool(words) and not line[-1:].isspace()
        return (words[:-1], words[-1]) if open_ else (words, "")


def register() -> None:
    """Take it in place of click's own."""
    add_completion_class(Bash, "bash")
