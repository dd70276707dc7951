"""Our dataclasses beside Python's own, of the same definition."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, astuple, field, fields, is_dataclass, replace
from dataclasses import dataclass as stock
from typing import Any

import pytest

from notes_cli import classes

NAN = float("nan")


def both(define: Callable[[Any], type], **options: bool) -> tuple[type, type]:
    """The class as we make it, and as Python does."""
    return define(classes.dataclass(slots=True, **options)), define(stock(slots=True, **options))


def typical(dataclass: Any) -> type:
    @dataclass
    class Typical:
        """Has every kind of field that there is in notes."""

        name: str
        size: int = 3
        parts: list[int] = field(default_factory=list)
        stamp: int = field(default=0, compare=False)
        hidden: int = field(default=1, repr=False)

    return Typical


def single(dataclass: Any) -> type:
    @dataclass
    class Single:
        """Has one field."""

        value: object

    return Single


def empty(dataclass: Any) -> type:
    @dataclass
    class Empty:
        """Has none."""

    return Empty


def checking(dataclass: Any) -> type:
    @dataclass
    class Checking:
        """Checks what it is given, and is equal and shown as it says itself."""

        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("too small")

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "it"

    return Checking


def derived(dataclass: Any) -> type:
    @dataclass
    class Base:
        """Has a field."""

        first: int

    @dataclass
    class Derived(Base):
        """Has another one."""

        second: int = 2

    return Derived


CASES: list[tuple[Callable[[Any], type], tuple[Any, ...], tuple[Any, ...]]] = [
    (typical, ("a",), ("a", 3, [], 5)),
    (typical, ("a",), ("a", 3, [], 0, 2)),
    (typical, ("a", 4, [1]), ("b", 4, [1])),
    (single, (NAN,), (NAN,)),
    (single, ((1, 2),), (1,)),
    (empty, (), ()),
    (checking, (1,), (2,)),
    (derived, (1,), (1, 2)),
]


@pytest.mark.parametrize("options", [{"frozen": True}, {"frozen": False}, {"frozen": True, "eq": False}])
@pytest.mark.parametrize(("define", "one", "other"), CASES)
def test_a_class_is_as_pythons_own(
    define: Callable[[Any], type], one: tuple[Any, ...], other: tuple[Any, ...], options: dict[str, bool]
) -> None:
    def facts(made: Any) -> list[object]:
        first, second = made(*one), made(*other)

        def tried(action: Callable[[], object]) -> object:
            try:
                return action()
            except Exception as error:
                return type(error), str(error)

        names = [found.name for found in fields(made)]
        found = [is_dataclass(made), names, made.__match_args__, made.__doc__, made.__qualname__, made.__module__]
        found += [made.__slots__, hasattr(first, "__dict__"), str(inspect.signature(made)), inspect.isclass(made)]
        found += [first == second, first == first, first != second, first == copy.copy(first), first == 3]
        found += [tried(lambda: hash(first) == hash(second)), tried(lambda: asdict(first)), astuple(second)]
        found += [asdict(replace(first)), asdict(copy.deepcopy(second))]
        if options.get("eq", True):
            found += [repr(first)]
        for name in names:
            found.append(tried(lambda name=name: setattr(first, name, 5)))  # type: ignore[misc]
            found.append(tried(lambda name=name: delattr(first, name)))  # type: ignore[misc]
        return [*found, tried(lambda: made(*one, unknown=1))]

    ours, theirs = both(define, **options)
    assert str(facts(ours)) == str(facts(theirs))  # by their texts, of which NaN has one


def test_what_is_checked_afterwards_is_checked() -> None:
    for made in both(checking, frozen=True):
        with pytest.raises(ValueError, match="too small"):
            made(-1)


def test_each_instance_has_a_default_of_its_own() -> None:
    made: Any = typical(classes.dataclass(slots=True, frozen=True))
    one, other = made("a"), made("a")
    assert one.parts is not other.parts
    with pytest.raises(FrozenInstanceError):
        one.parts = []
    with pytest.raises(FrozenInstanceError):  # where Python's own say something about super()
        one.unknown = 1


@classes.dataclass(frozen=True, slots=True)
class Kept:
    """For pickle, which looks classes up by name."""

    name: str
    size: int = 1


def test_it_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Kept("a", 2))) == Kept("a", 2)


@pytest.mark.parametrize("form", [{"init": False}, {"kw_only": True}, {"hash": False}])
def test_what_is_not_made_is_refused(form: dict[str, bool]) -> None:
    def define(dataclass: Any) -> type:
        @dataclass
        class Other:
            """Has a field of a kind that nobody needs."""

            name: str = field(default="", **form)  # type: ignore[call-overload]

        return Other

    with pytest.raises(TypeError, match="name is a field for"):
        define(classes.dataclass(slots=True, frozen=True))
    with pytest.raises(TypeError, match="without slots"):
        classes.dataclass(slots=False)
