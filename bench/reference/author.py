"""The logits of the author's code: editkv for edits, esys/composable_kv.py for transplants, Hugging Face for the model.

Both are imported from a clone; nothing of them is in this project. The tokenizer is the engine's, so that the token ids
are the same.
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
from transformers.utils import logging

from bench.reference.cases import Case, CaseTokens, Tokenize
from bench.reference.ours import EDITS, FULL, OTHER_LENGTH, TRANSPLANTED, Logits


def on_cpu(path: Path) -> ModuleType:
    """Import one of the author's scripts, which name a GPU, for the CPU."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # his scripts import each other
    source = path.read_text(encoding="utf-8").replace('"cuda"', '"cpu"')
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def write_tasks(clone: Path, path: Path) -> Path:
    """Write the tasks of the author's scripts in the form that cases.py reads."""
    on_cpu(clone / "esys" / "composable_kv.py")
    gated, edits, facts = (
        vars(on_cpu(clone / "esys" / f"{name}.py")) for name in ("diverse_tasks", "compose_edit", "composable_facts")
    )
    words = {name: facts[name] for name in ("CO", "CITY", "NAME", "DRUG", "NUM", "DOMAINS", "SYS")}
    tasks = {
        "gated": {"tasks": gated["TASKS"]},
        "compose_edit": {"INSTANCES": edits["INSTANCES"]},
        "facts": words,
    }
    path.write_text(json.dumps(tasks), encoding="utf-8")
    return path


class Author:
    """A model of transformers with the author's modules. `tokenize`: the engine's tokenizer."""

    def __init__(self, clone: Path, path: Path, tokenize: Tokenize, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        sys.path.insert(0, str(clone))
        self.editkv: Any = importlib.import_module("editkv")
        self.composable: Any = on_cpu(clone / "esys" / "composable_kv.py")
        self.model, self.tokenize = load(path), tokenize

    def logits_of(self, case: Case, tokens: CaseTokens) -> dict[str, Logits]:
        """As ours.logits_of. Raises ValueError where editkv sees other tokens or another field than the engine."""
        context = self._prefilled(case, tokens)
        found = self._edited(context, case)
        found[FULL] = self._decided(context, case, self.editkv.Mode.FULL_REPREFILL)
        (first, last), ids, composable = tokens.chunk, context._ids, self.composable
        alone = composable.precompute_chunk(self.model, ids[:, first:last])
        moved = composable.repositioned_chunk_cache(self.model, alone, last - first, first)
        spliced = composable.cache_concat(composable.prefill(self.model, ids[:, :first]), moved)
        context._cache = composable.forward_suffix(self.model, spliced, ids[:, last:], last).past_key_values
        return found | {f"{TRANSPLANTED}{name}": logits for name, logits in self._edited(context, case).items()}

    def logits_of_other_length(self, case: Case, tokens: CaseTokens) -> dict[str, Logits]:
        """As ours.logits_of_other_length: editkv refuses, so the cache is composed of three parts with the author's
        functions. Raises ValueError if editkv does not refuse."""
        context = self._prefilled(case, tokens)
        try:
            context.build_cache("field", case.new, self.editkv.Mode.IN_PLACE, case.ask)
        except self.editkv.LengthChangeError:
            pass
        else:
            raise ValueError(f"{case.name}: editkv replaced a value by one of another length")
        composable, (first, last), end = self.composable, tokens.field, tokens.new_field[1]
        new, grows = torch.tensor([tokens.value]), end - last
        head = composable.cache_slice(context._cache, 0, first)
        head = composable.forward_suffix(self.model, head, new, first).past_key_values
        tail, places = composable.cache_slice(context._cache, last, context._len), range(last, context._len)
        for layer in tail.layers:
            layer.keys = composable.reposition(self.model, layer.keys, [*places], [place + grows for place in places])
        context._cache, context._len = composable.cache_concat(head, tail), context._len + grows
        return {OTHER_LENGTH: self._decided(context, case, self.editkv.Mode.STALE)}

    def _prefilled(self, case: Case, tokens: CaseTokens) -> Any:
        """editkv's context of a case, with its old value."""
        context = self.editkv.EditableContext(self.model, self._tokenizer, "cpu", trigger_template=case.erratum)
        context.add_text(case.head + case.opening)
        field = context.add_field("field", case.old, label=case.label)
        context.add_text(case.closing + case.rest)
        with torch.no_grad():
            context.prefill()
        if context._ids[0].tolist() != tokens.old or tuple(field.span) != tokens.field:
            raise ValueError(f"{case.name}: editkv has other tokens, or its field is elsewhere: {field.span}")
        return context

    def _edited(self, context: Any, case: Case) -> dict[str, Logits]:
        mode = self.editkv.Mode
        modes = {
            (False, False): mode.STALE,
            (True, False): mode.IN_PLACE,
            (False, True): mode.ERRATUM,
            (True, True): mode.FIELD_PLUS_ERRATUM,
        }
        return {name: self._decided(context, case, modes[edit]) for name, edit in EDITS.items()}

    @torch.no_grad()
    def _decided(self, context: Any, case: Case, mode: Any) -> Logits:
        """The logits for the first token of the answer."""
        cache, last, position = context.build_cache("field", case.new, mode, case.ask)
        if cache.get_seq_length() != position:
            raise ValueError(f"{case.name}: editkv's cache has {cache.get_seq_length()} entries, and not {position}")
        out = self.model(input_ids=torch.tensor([[last]]), past_key_values=cache, use_cache=True)
        logits: Logits = out.logits[0, -1].float().numpy()
        return logits

    def _tokenizer(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": self.tokenize(text)}


def load(path: Path) -> Any:
    """Load a GGUF of the architecture llama, with or without biases, in f32. Raises ValueError for weights that are not
    found in the file, but for the output's bias, which is 0 then."""
    biases = any(tensor.name.endswith("attn_q.bias") for tensor in gguf.GGUFReader(path).tensors)
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        attention_bias=biases,
        output_loading_info=True,
    )
    for name in report["missing_keys"]:
        if not name.endswith("o_proj.bias") or model.get_parameter(name).any():
            raise ValueError(f"{path}: transformers finds no {name} in it")
    return model.eval()
