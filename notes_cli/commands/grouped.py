"""Long help pages: the options of a command under headings, those that few need last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

MODEL = ("model", "ctx_size", "threads", "gpu_layers", "mmproj")
EXPERT = (
    *("batch_size", "ubatch_size", "rpc", "image_min_tokens", "image_max_tokens", "flash_attn"),
    *("cache_type_k", "cache_type_v", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
    *("beyond_trained", "carry"),
)
REST = "Options"


class Grouped(click.Command):
    """A command whose help has its options in groups. `groups`: parameters by heading, in their order; all others come
    first."""

    def __init__(self, *given: Any, groups: Mapping[str, Sequence[str]] | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.groups = {"Model": MODEL, "Expert": EXPERT} if groups is None else groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        records = {"help" if "--help" in one.opts else one.name: one.get_help_record(ctx) for one in options}
        listed = {name for names in self.groups.values() for name in names}
        for title, names in {REST: [name for name in records if name not in listed], **self.groups}.items():
            found = [record for name in names if (record := records.get(name))]
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)
