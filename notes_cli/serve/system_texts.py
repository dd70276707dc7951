"""Keeps the system texts of a model with recurrent layers on disk, so that they survive a restart.

Rows of such a model are reused at the beginning of a prompt only. While the server is idle, it writes those before the
first question of the latest prompt, with the recurrent state after them, into a file beside learned texts
(serve/learned.py), and it adds these files to the prefix cache when it starts (`PrefixStore.add_file`). A text with
words about the present is not kept, as it differs in the next prompt.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError
from notes_cli.library.container import peek
from notes_cli.library.segment_files import LEARNED, segment_files
from notes_cli.library.store import Library
from notes_cli.runtime.prefix_cache import PrefixCache, PrefixStore
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.learned import LEAST, PRESENT_WORDS, name_of, write


class SystemTexts:
    """The files of system texts. Use it from the thread of the context."""

    def __init__(self, workspace: Workspace, library: Library, prefixes: PrefixCache, store: PrefixStore) -> None:
        """Add the files of this model to the store."""
        self._workspace, self._prefixes, self._store = workspace, prefixes, store
        self._library = Library(library.folder / LEARNED)
        self._known: set[str] = set()  # names of texts that have a file, or get none
        self._writer = ThreadPoolExecutor(1, "system-texts")
        for _, path in segment_files(self._library.folder):
            with suppress(NotesError):  # damaged: it is removed when there is no room for others
                segment = peek(path)
                if segment.prefix_only and not segment.base and segment.identity == workspace.identity:
                    store.add_file(segment)
                    self._known.add(segment.name)

    def close(self) -> None:
        """Wait for files that are being written."""
        self._writer.shutdown()

    def keep(self) -> None:
        """Write the system text of the latest idle prefix, unless it has a file, or a salt: then it is one client's."""
        prefix = max(self._prefixes.idle_prefixes(), key=lambda prefix: prefix.used, default=None)
        if prefix is None or prefix.layout is None or prefix.salt or not self._store.exact:
            return
        length, sequence = prefix.layout.opening, prefix.sequence
        tokens = prefix.tokens[:length].copy()
        name = name_of(tokens)
        decoded = not prefix.origins[:length].any() and not any(image.first < length for image in sequence.images)
        state = sequence.states.get(length)
        if length < LEAST or not decoded or state is None or name in self._known:
            return
        self._known.add(name)
        with suppress(NotesError, MemoryError):  # it is read again after a restart
            talk = prefix.layout.prompt.conversation
            texts = [message.text.encode() for message in talk.messages if message.role == "system"] if talk else []
            if any(map(PRESENT_WORDS.search, texts)):
                return
            context, text = self._workspace.context, self._workspace.model.text(tokens)
            rows, _ = sequence.read(0, len(sequence), context.lossless_type)  # no part can be read
            states = iter(context.state_rows(state))
            layers = [next(states) if layer.part == "state" else layer.cut(slice(length)) for layer in rows]
            what = name, "", text, tokens, 0, np.zeros(0, np.int32), ()
            segment = Segment(*what, self._workspace.identity, layers, prefix_only=True)
            self._writer.submit(write, self._library, segment)
