"""Reads YAML from users and untrusted files: front matter, config.yaml, wordings, batteries.

Scalars stay text (a date, or 012). Duplicate keys, deep nesting and aliases that expand to
too many values are refused with the line. Files that are too large are refused unread: PyYAML takes 10 seconds for a
megabyte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from notes_cli.errors import NotesError, reason

MAX_BYTES = 1 << 20  # of a file: 5,000 decisions of a battery
MAX_DEPTH = 50
MAX_ALIASED = 100_000  # values that all aliases together may expand to


class _Loader(yaml.BaseLoader):
    """Reads all scalars as text, within the limits."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in complete nodes, with aliases expanded
        self._aliased = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self._depth == MAX_DEPTH:
            raise _problem("it is nested too deeply", event)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!") and tag not in yaml.SafeLoader.yaml_constructors:
            raise _problem(f"the tag {tag[:64]!r} is unknown", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._count(node, event)
        elif node is not None:
            self._sizes[node] = 1 + sum(self._sizes[part] for part in _parts(node))
        return node

    def _count(self, node: yaml.Node | None, event: yaml.AliasEvent) -> None:
        if node not in self._sizes:
            raise _problem(f"the alias *{event.anchor} is inside of what it names", event)
        self._aliased += self._sizes[node]
        if self._aliased > MAX_ALIASED:
            raise _problem(f"its aliases stand for more than {MAX_ALIASED:,} values", event)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                earlier = first.setdefault((key.tag, key.value), key)
                if earlier is not key:
                    line = earlier.start_mark.line + 1
                    raise _problem(
                        f"the key {key.value[:64]!r} is there already, in line {line}. Keep one of them", key
                    )
        return node


def _problem(text: str, where: Any) -> ComposerError:
    return ComposerError(problem=text, problem_mark=where.start_mark)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file. Raises NotesError, in one line, for a file that is missing or cannot be read."""
    return yaml_in(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a YAML file, at most one more than MAX_BYTES. Raises NotesError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotesError(f"cannot read {path}: {reason(error)}") from error


def yaml_in(data: bytes, path: Path) -> Any:
    """Return the value in the bytes of a YAML file. Raises NotesError."""
    if len(data) > MAX_BYTES:
        raise NotesError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "Is it the file that you meant?")
    try:
        return parse_yaml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise NotesError(f"cannot read {path}: it is not UTF-8 text") from error
    except ValueError as error:
        raise NotesError(f"{path} is not valid YAML: {error}") from error


def parse_yaml(text: str) -> Any:
    """Return the value in a YAML text. Raises ValueError, in one line, for invalid YAML and beyond the limits."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context or ""
        problem = f"{error.context}, {problem}" if error.context and problem.startswith("but ") else problem
        raise ValueError(where + _line(problem)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(_line(str(error))) from error


def _line(text: str) -> str:
    return " ".join(text.split())
