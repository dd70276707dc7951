"""Tests that sizes and ages are parsed as meant, or refused."""

from __future__ import annotations

from notes_cli.errors import NotesError
from notes_cli.text.names import human_age, human_size, parse_age, parse_size

from ..refused import refused


def test_sizes_and_ages() -> None:
    """A misread budget would remove files that should stay."""
    sizes = {"20GB": 20 * 10**9, "1.5 GiB": 3 << 29, "500mb": 500 * 10**6, "10k": 10_000, "12345": 12345, "1 B": 1}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "1 XB", "1e9", "1iB", "9" * 400, "1,5GB"):
        with refused(NotesError, "is not a size"):
            parse_size(text)
    assert (parse_age("30d"), parse_age("12 h"), parse_age("2w"), parse_age("90s")) == (2592000, 43200, 1209600, 90)
    for text in ("", "30", "d", "-1d", "1month"):
        with refused(NotesError, "is not an age"):
            parse_age(text)


def test_for_people() -> None:
    assert [human_size(count) for count in (0, 999, 1000, 999_949, 999_950, 2_500_000, 3.2e12)] == [
        *("0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "2.5 MB"),
        "3200.0 GB",
    ]
    assert [human_age(seconds) for seconds in (-1, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
