"""Defines Identity: everything that decides whether a segment fits a context."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a model in a context. All fields are strings, stored and compared as printed. Fields for display only
    are not compared: a renamed file is still the same model."""

    model: str = field(compare=False)  # general.name of the GGUF, else its file name
    architecture: str
    quantization: str = field(compare=False)  # e.g. "Q8_0"
    weights: str  # sha256 of the whole GGUF file: weights and tokenizer
    rope: str  # digest of the effective rotation: per layer its kind, frequencies and magnitude
    rope_text: str = field(compare=False)  # for display, e.g. "neox base 10000 scale 1"
    kv_type: str  # data types of K and V in the cache, e.g. "f16/f16"
    adapters: str  # digest of the adapters in use, "" without any

    @property
    def key(self) -> str:
        """Short digest of the compared fields; used in the file name of a segment."""
        compared = (field_.name for field_ in fields(self) if field_.compare)
        parts = "\n".join(f"{name}={getattr(self, name)}" for name in compared)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> Identity:
        """Build from a dict. Raises KeyError for a missing field."""
        return cls(**{field_.name: str(data[field_.name]) for field_ in fields(cls)})

    def differences(self, other: Identity, done: str = "compiled") -> list[str]:
        """Describe how `other` (the context at hand) differs, most important first. `done`: a participle for how this
        identity was used."""
        texts = []
        if self.architecture != other.architecture:
            texts.append(f"{done} for architecture {self.architecture}, this model is {other.architecture}")
        elif self.weights != other.weights:
            if self.model == other.model and self.quantization != other.quantization:
                texts.append(f"{done} with {self.model} {self.quantization}, this model is {other.quantization}")
            else:
                texts.append(
                    f"{done} with {self.model} {self.quantization} ({self.weights[:12]}), "
                    f"this model is {other.model} {other.quantization} ({other.weights[:12]})"
                )
        elif self.rope != other.rope:
            ours, theirs = self.rope_text, other.rope_text
            if ours == theirs:  # e.g. the factors of LongRoPE, which depend on the size of the context
                ours, theirs = f"{ours} ({self.rope[:12]})", f"{theirs} ({other.rope[:12]})"
            texts.append(f"{done} with RoPE {ours}, this context uses {theirs}")
        if self.kv_type != other.kv_type:
            texts.append(f"{done} from a {self.kv_type} K/V cache, this context keeps {other.kv_type}")
        if self.adapters != other.adapters:
            ours, theirs = (digest[:12] or "none" for digest in (self.adapters, other.adapters))
            texts.append(f"{done} with adapters (LoRA): {ours}, this context uses {theirs}")
        return texts
