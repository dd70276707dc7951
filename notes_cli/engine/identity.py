"""Identity: everything that decides whether a segment fits a context.

Two identities are equal or they are not; where they differ, `differences` says in words what does.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a model as one context runs it. All strings, so that it is stored and compared as it is printed.

    What is for people is kept beside what is compared: a renamed file is still the same model.
    """

    model: str = field(compare=False)  # general.name of the GGUF, else its file name
    architecture: str
    quantization: str = field(compare=False)  # e.g. "Q8_0"
    weights: str  # sha256 of the whole GGUF file: weights and tokenizer
    rope: str  # digest of the effective rotation: per layer its kind, frequencies and magnitude
    rope_text: str = field(compare=False)  # the same in words, e.g. "neox base 10000 scale 1"
    kv_type: str  # e.g. "f16/f16": K and V as the context keeps them
    adapters: str  # digest of the adapters in use, "" without

    @property
    def key(self) -> str:
        """Short digest of what is compared; names the file of a segment."""
        compared = (one.name for one in fields(self) if one.compare)
        parts = "\n".join(f"{name}={getattr(self, name)}" for name in compared)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> Identity:
        """Raise KeyError if a part is missing."""
        return cls(**{one.name: str(data[one.name]) for one in fields(cls)})

    def differences(self, other: Identity, done: str = "compiled") -> list[str]:
        """What of `other` (the context at hand) does not fit, in words, the weightiest first. `done`: what was done
        with this identity."""
        found = []
        if self.architecture != other.architecture:
            found.append(f"{done} for architecture {self.architecture}, this model is {other.architecture}")
        elif self.weights != other.weights:
            if self.model == other.model and self.quantization != other.quantization:
                found.append(f"{done} with {self.model} {self.quantization}, this model is {other.quantization}")
            else:
                found.append(
                    f"{done} with {self.model} {self.quantization} ({self.weights[:12]}), "
                    f"this model is {other.model} {other.quantization} ({other.weights[:12]})"
                )
        elif self.rope != other.rope:
            mine, theirs = self.rope_text, other.rope_text
            if mine == theirs:  # such as the factors of LongRoPE, which go by the size of the context
                mine, theirs = f"{mine} ({self.rope[:12]})", f"{theirs} ({other.rope[:12]})"
            found.append(f"{done} with RoPE {mine}, this context uses {theirs}")
        if self.kv_type != other.kv_type:
            found.append(f"{done} from a {self.kv_type} K/V cache, this context keeps {other.kv_type}")
        if self.adapters != other.adapters:
            mine, theirs = (one[:12] or "none" for one in (self.adapters, other.adapters))
            found.append(f"{done} with adapters (LoRA): {mine}, this context uses {theirs}")
        return found
