"""Numbers between bounds as rules of a grammar: their digits, as JSON writes them."""

from __future__ import annotations

from notes_cli.text.grammar import times

DIGITS = 15  # of a whole number, unless its bounds have more
Bound = tuple[int, bool]  # a whole number, and whether it is excluded


def mirrored(bound: Bound | None) -> Bound | None:
    """The bound of the numbers with the other sign."""
    return None if bound is None else (-bound[0], bound[1])


def positive(low: Bound | None, high: Bound | None, sign: str) -> list[str]:
    """Numbers of one sign between two bounds; with the minus, zero is left to the others."""
    first, open_low = low if low is not None and low[0] >= 0 else (0, False)
    open_low = open_low or (sign == "-" and first == 0)
    last, open_high = high if high is not None else (10 ** max(DIGITS, len(str(first)) + 1), True)
    if last < first or (last == first and (open_low or open_high)):
        return []
    sign = f'"{sign}" ' if sign else ""
    fraction = '("." [0-9]{1,16})?'
    found = []
    if open_low and last > first:
        found.append(f'{sign}"{first}." [0-9]{{0,15}} [1-9]')
    if first + open_low <= last - 1:
        found += [f"{sign}{way} {fraction}" for way in _digits_between(first + open_low, last - 1)]
    if not open_high and not (open_low and last == first):
        found.append(f'{sign}"{last}"')
    return found


def whole_between(low: int | None, high: int | None) -> list[str]:
    """Whole numbers between two bounds, both included."""
    most = 10 ** max(DIGITS, *(len(str(abs(bound))) + 1 for bound in (low, high) if bound is not None)) - 1
    low, high = -most if low is None else low, most if high is None else high
    found = [f'"-" {way}' for way in _digits_between(max(1, -high), -low)] if low < 0 else []
    return found + (_digits_between(max(0, low), high) if high >= 0 else [])


def _digits_between(low: int, high: int) -> list[str]:
    """The digits of whole numbers from 0 on."""
    found: list[str] = []
    if low > high:
        return found
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = (10 ** (length - 1) if length > 1 else 0), 10**length - 1
        found += _same_length(str(max(low, first)), str(min(high, last)))
    return found


def _same_length(low: str, high: str) -> list[str]:
    """The digits between two of the same length."""
    if not low:
        return [""]
    if low == "0" * len(low) and high == "9" * len(low):
        return [times("[0-9]", len(low), len(low))]
    if low[0] == high[0]:
        return [f'"{low[0]}" {rest}'.rstrip() for rest in _same_length(low[1:], high[1:])]
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    first, last = int(low[0]), int(high[0])
    found = []
    if low[1:] != zeros:
        found += [f'"{first}" {rest}'.rstrip() for rest in _same_length(low[1:], nines)]
        first += 1
    ends: list[str] = []
    if high[1:] != nines:
        ends = [f'"{last}" {rest}'.rstrip() for rest in _same_length(zeros, high[1:])]
        last -= 1
    if first <= last:
        digit = f'"{first}"' if first == last else f"[{first}-{last}]"
        found.append(f"{digit} {times('[0-9]', len(zeros), len(zeros)) if zeros else ''}".rstrip())
    return found + ends
