"""The logits of the author's code: editkv for edits, esys/composable_kv.py for transplants, Hugging Face for the model.

Both are imported from a clone. The tokenizer is the engine's, so that the token ids are the same.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

from bench.reference.cases import Case, CaseTokens, Tokenize
from bench.reference.ours import EDITS, FULL, OTHER_LENGTH, TRANSPLANTED, Logits


def on_cpu(clone: Path, name: str) -> ModuleType:
    """Import one of the author's scripts, which name a GPU, for the CPU."""
    path = clone / "esys" / f"{name}.py"
    module = sys.modules[name] = ModuleType(name)  # the scripts import each other
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8").replace('"cuda"', '"cpu"'), path, "exec"), vars(module))
    return module


def write_tasks(clone: Path, path: Path) -> Path:
    """Write the tasks of the author's scripts in the form that cases.py reads."""
    on_cpu(clone, "composable_kv")
    facts = on_cpu(clone, "composable_facts")
    tasks = {
        "gated": {"tasks": on_cpu(clone, "diverse_tasks").TASKS},
        "compose_edit": {"INSTANCES": on_cpu(clone, "compose_edit").INSTANCES},
        "facts": {name: getattr(facts, name) for name in ("CO", "CITY", "NAME", "DRUG", "NUM", "DOMAINS", "SYS")},
    }
    path.write_text(json.dumps(tasks), encoding="utf-8")
    return path


class Author:
    """A model of transformers with the author's modules. `tokenize`: the engine's tokenizer."""

    def __init__(self, clone: Path, path: Path, tokenize: Tokenize, threads: int) -> None:
        torch.set_num_threads(threads)
        sys.path.insert(0, str(clone))
        self.editkv: Any = importlib.import_module("editkv")
        self.composable: Any = on_cpu(clone, "composable_kv")
        self.model, self.tokenize = load(path), tokenize

    def logits_of(self, case: Case, tokens: CaseTokens) -> dict[str, Logits]:
        """As ours.logits_of. Raises ValueError where editkv has other tokens or another field than the engine."""
        context, composable = self._prefilled(case, tokens), self.composable
        found = self._edited(context, case)
        found[FULL] = self._decided(context, case, "full_reprefill")
        (first, last), ids = tokens.chunk, context._ids
        alone = composable.precompute_chunk(self.model, ids[:, first:last])
        moved = composable.repositioned_chunk_cache(self.model, alone, last - first, first)
        spliced = composable.cache_concat(composable.prefill(self.model, ids[:, :first]), moved)
        context._cache = composable.forward_suffix(self.model, spliced, ids[:, last:], last).past_key_values
        return found | {f"{TRANSPLANTED}{state}": logits for state, logits in self._edited(context, case).items()}

    def logits_of_other_length(self, case: Case, tokens: CaseTokens) -> dict[str, Logits]:
        """As ours.logits_of_other_length: editkv refuses it, so the cache is composed of three parts with the author's
        functions. Raises ValueError if editkv does not refuse."""
        context, composable, (first, last) = self._prefilled(case, tokens), self.composable, tokens.field
        try:
            self._decided(context, case, "in_place")
        except self.editkv.LengthChangeError:
            pass
        else:
            raise ValueError(f"{case.name}: editkv replaced a value by one of another length")
        head = composable.cache_slice(context._cache, 0, first)
        head = composable.forward_suffix(self.model, head, torch.tensor([tokens.value]), first).past_key_values
        tail, at = composable.cache_slice(context._cache, last, context._len), [*range(last, context._len)]
        to = [place + first + len(tokens.value) - last for place in at]
        for layer in tail.layers:
            layer.keys = composable.reposition(self.model, layer.keys, at, to)
        context._cache, context._len = composable.cache_concat(head, tail), to[-1] + 1
        return {OTHER_LENGTH: self._decided(context, case, "stale")}

    @torch.no_grad()
    def _prefilled(self, case: Case, tokens: CaseTokens) -> Any:
        """editkv's context of a case, with its old value."""
        context = self.editkv.EditableContext(self.model, self._tokenizer, "cpu", trigger_template=case.erratum)
        context.add_text(case.head + case.opening)
        field = context.add_field("field", case.old, label=case.label)
        context.add_text(case.closing + case.rest)
        context.prefill()
        if context._ids[0].tolist() != tokens.context or tuple(field.span) != tokens.field:
            raise ValueError(f"{case.name}: editkv has other tokens, or its field is elsewhere: {field.span}")
        return context

    def _edited(self, context: Any, case: Case) -> dict[str, Logits]:
        modes = dict(zip(EDITS, ("stale", "in_place", "erratum", "field_plus_erratum"), strict=True))
        return {state: self._decided(context, case, mode) for state, mode in modes.items()}

    @torch.no_grad()
    def _decided(self, context: Any, case: Case, mode: str) -> Logits:
        """The logits for the first token of the answer."""
        cache, last, position = context.build_cache("field", case.new, self.editkv.Mode(mode), case.ask)
        if cache.get_seq_length() != position:
            raise ValueError(f"{case.name}: editkv's cache has {cache.get_seq_length()} entries, and not {position}")
        logits: Logits = self.model(input_ids=torch.tensor([[last]]), past_key_values=cache).logits[0, -1].numpy()
        return logits

    def _tokenizer(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.tokenize(text)}


def load(path: Path) -> Any:
    """Load a GGUF of the architecture llama, with or without biases, in f32. Raises ValueError where weights are
    missing in the file; the bias of attention's output may be, and is 0."""
    biased = any(tensor.name.endswith("attn_q.bias") for tensor in gguf.GGUFReader(path).tensors)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "attention_bias": biased}
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, output_loading_info=True, **options
    )
    for name in report["missing_keys"]:
        if not name.endswith("o_proj.bias") or model.get_parameter(name).any():
            raise ValueError(f"{path}: transformers finds no {name} in it")
    return model.eval()
