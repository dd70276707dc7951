"""Determines a model's identity in its context, and by measurements whether K/V may be moved and state carried."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property

from notes_cli.config import Paths
from notes_cli.engine import devices
from notes_cli.engine.header import Source
from notes_cli.engine.rotation import RotationCheck, measure_rotation
from notes_cli.engine.segment import Identity
from notes_cli.errors import ModelError, NotesError
from notes_cli.library.facts import Memory, file_sha256
from notes_cli.library.profiles import Profiles
from notes_cli.runtime.contexts import Contexts

REMEMBERED = 256  # rotation checks


class IdentifiedContexts(Contexts):
    """Contexts with the identity of the model. Workspace sets the attributes below."""

    paths: Paths  # of cached data about models, and of their profiles
    _carry: bool | None
    _hashing: Callable[[int, int], None] | None
    _measured: dict[str, bool]  # key of a profile -> whether it allows carrying state
    _weights: str | None = None

    @property
    def weights(self) -> str:
        """SHA-256 of the model's file (of the digests of its files, if it is split), cached between runs. Raises
        ModelError if a loaded file has changed."""
        sources = self.model.sources
        if self._weights is None:
            digest = self._hash()
            changed_sources = [source for source in sources if source.changed]
        else:
            changed_sources = [source for source in sources if source.changed]
            digest = self._hash() if changed_sources else self._weights
            if digest == self._weights:  # moved, linked or touched
                for source in changed_sources:
                    source.accept_content()
                changed_sources = []
        if changed_sources:
            raise changed(changed_sources[0])
        self._weights = digest
        return digest

    def _hash(self) -> str:
        digests = [self.digest(source) for source in self.model.sources]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def digest(self, source: Source) -> str:
        """Return the SHA-256 of an open file."""
        return file_sha256(source.path, source.file, self.paths.models / "digests.json", self._hashing)

    @property
    def identity(self) -> Identity:
        """Identity of this model in this context. Raises UnsupportedError where its K/V cannot be read."""
        return self.refresh_capabilities()

    def refresh_capabilities(self) -> Identity:
        """See to it that the context goes by what is known of a model of this identity: whether its rows may be moved,
        and a state carried. Asking for the identity does it, so it cannot be forgotten. Any thread may do so."""
        weights, context = self.weights, self.context
        with context.remaking:
            identity = context.identity(weights)
            turned = self._rotations.get(self._rotation_key(identity))
            context.unmovable = None if turned is None or turned.right else turned.reason
            if self.model.recurrent:
                context.carries = self._carries(identity)
        return identity

    def _carries(self, identity: Identity) -> bool:
        """True if state may be carried through skills: as configured, else as measured."""
        if self._carry is not None:
            return self._carry
        cache = self.context.options.cache
        key = f"{identity.key} {cache}"
        if key not in self._measured:
            self._measured[key] = False
            with suppress(NotesError):  # an unusable profile is reported where it is used
                profile = Profiles(self.paths.profiles).find(identity, cache)
                self._measured[key] = profile is not None and profile.carries
        return self._measured[key]

    @contextmanager
    def with_carry(self, carry: bool) -> Iterator[None]:
        """Turn carrying of state on or off during the block, to measure it."""
        before, self._carry = self._carry, carry
        try:
            self.refresh_capabilities()
            yield
        finally:
            self._carry = before
            self.refresh_capabilities()

    def measure_rotation(self) -> None:
        """Check once per identity that keys rotate as expected; if not, K/V will not be moved."""
        key = self._rotation_key(self.identity)
        if key in self._rotations:
            return
        with self.scratch() as sequence:
            self._rotations[key] = measure_rotation(sequence.context, sequence.seq_id)
        self._checks.add({key: self._rotations[key]})
        self.refresh_capabilities()

    @cached_property
    def _rotations(self) -> dict[str, RotationCheck | None]:
        return self._checks.load()

    @property
    def _checks(self) -> Memory[RotationCheck | None]:
        """Values are None where there was nothing to measure."""
        return Memory(self.paths.models / "turns.json", REMEMBERED, _check_of, lambda check: check and asdict(check))

    def _rotation_key(self, identity: Identity) -> str:
        """Return a key for the model, its rotation and the build of the native library, whose graphs may change."""
        return f"{identity.key} {devices.build()}"


def changed(source: Source) -> ModelError:
    """Make the error for a changed file."""
    text = f"{source.path} was changed after it was loaded: what was computed belongs to no file"
    return ModelError(text, "Run this again")


def _check_of(entry: dict[str, int | float] | None) -> RotationCheck | None:
    if entry is None:
        return None
    check = RotationCheck(**{name: entry[name] for name in ("distance", "layer", "error", "bound")})  # type: ignore[arg-type]
    kinds = [type(value) for value in asdict(check).values()]
    if kinds != [int, int, float, float] or not check.bound < 1:
        raise ValueError(entry)
    return check
