"""Dataclasses as settings: values are checked against the types and ranges of the fields, and read from YAML.

    batch_size: Annotated[int, Range(1)] = 100

A value of another type is refused by name, and so is a number outside its range, NaN or infinity.
"""

import ast
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from radq.errors import OptionError, first_line

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless they are left out."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    without_high: bool = False
    also: int | None = None  # one number outside the range that has a meaning of its own

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.without_low else number >= self.low
        below = number < self.high if self.without_high else number <= self.high
        return (above and below) or number == self.also

    def __str__(self) -> str:
        low = f"{'more than' if self.without_low else 'at least'} {self.low:,}"
        high = f"{'less than' if self.without_high else 'at most'} {self.high:,}"
        parts = [low] if math.isinf(self.high) else [high] if math.isinf(self.low) else [low, high]
        return " and ".join(parts) + ("" if self.also is None else f", or {self.also}")


COUNT = Range(1, 2**31 - 1)


def renamed(**names: str) -> Callable[[F], F]:
    """Let a function take arguments by their names of the last release, too, with a note: `renamed(old="new")`."""

    def change(function: F) -> F:
        @wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            for old, new in names.items():
                if old in options:
                    if new in options:
                        raise TypeError(f"{old} and {new} are the same argument: give {new} alone.")
                    warnings.warn(f"{old} is now {new}.", FutureWarning, stacklevel=2)
                    options[new] = options.pop(old)
            return function(*given, **options)

        return call  # pyright: ignore[reportReturnType]

    return change


def asked_threads() -> int | None:
    """The number of threads that the variable RADQ_THREADS asks for; None if it is not set."""
    asked = os.environ.get("RADQ_THREADS")
    if not asked:
        return None
    if not asked.isascii() or not asked.isdigit() or not 1 <= int(asked) <= 1024:
        raise OptionError(
            f"RADQ_THREADS must be a whole number from 1 to 1024, got {asked!r}.",
            "set it to the number of cores to use.",
        )
    return int(asked)


def names_in_table(table: str) -> tuple[str, ...]:
    """Names in a table of a module, such as "radq.models.heads:HEADS", for the type of a setting: `Literal[*names]`.

    They are read from the source of the module: importing it would import torch, and help would take seconds.
    """
    module, _, name = table.partition(":")
    spec: Any = find_spec(module)
    for statement in ast.parse(spec.loader.get_source(module)).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value: Any = statement.value  # pyright: ignore[reportAttributeAccessIssue]
            return tuple(key.value for key in value.keys)
    raise LookupError(f"{module} has no table {name}")


def read_yaml(file: str | Path, kind: type[T]) -> T:
    """Read a YAML file of names and values into the dataclass `kind`, whose fields may be dataclasses themselves.

    An error names the file and the place in it.
    """
    return build(load_yaml(file), kind, repr(str(file)))


def load_yaml(file: str | Path) -> Any:
    """The contents of a YAML file; those of an empty one are {}."""
    try:
        stored = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        reason = getattr(error, "problem", None) or first_line(error)
        raise OptionError(f"cannot read {str(file)!r}{place}: {reason}.", "give a YAML file.") from error
    return {} if stored is None else stored


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice, of which YAML's own loader keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name = self.construct_object(key)
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{name!r} stands there a second time", key.start_mark
                    )
                seen.add(name)
        return super().construct_mapping(node, deep)


def check_values(settings: Any) -> None:
    """Refuse values of another type or out of range in a dataclass; 3.0 becomes 3 in a field for integers."""
    for name, wanted in get_type_hints(type(settings), include_extras=True).items():
        object.__setattr__(settings, name, _convert(getattr(settings, name), wanted, name))  # it may be frozen


def check_ranges(settings: Any) -> None:
    """Refuse numbers outside the ranges of their fields in a dataclass; other values are not looked at."""
    for name, wanted in get_type_hints(type(settings), include_extras=True).items():
        if any(isinstance(mark, Range) for mark in getattr(wanted, "__metadata__", ())):
            _convert(getattr(settings, name), wanted, name)


def build(value: Any, kind: type[T], place: str) -> T:
    """Make a dataclass from names with values; `place` says in errors where these stand."""
    if isinstance(value, kind):
        return value
    hints = get_type_hints(kind, include_extras=True)
    if not isinstance(value, dict):
        raise OptionError(f"{place} must hold names with values, got {value!r}.", f"it takes {', '.join(hints)}.")
    for name in value:
        if name not in hints:
            raise OptionError(f"{place} sets {name!r}, which is no option.", f"choose from {', '.join(hints)}.")
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise OptionError(f"{place} has no {field.name!r}.", f"add {field.name!r} with its value.")
    return kind(**{name: _convert(item, hints[name], f"{place}: {name}") for name, item in value.items()})


def _convert(value: Any, wanted: Any, place: str) -> Any:
    """Convert a value to the type of its field: YAML reads 1e-5 as a text and knows no tuples."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if is_dataclass(wanted):
        return build(value, wanted, place)  # pyright: ignore[reportArgumentType]
    if origin is Annotated:
        value = _convert(value, parts[0], place)
        for limits in parts[1:]:
            if isinstance(limits, Range) and value is not None and value not in limits:
                raise _wrong(place, value, str(limits), "choose a number in this range.")
        return value
    if origin in (Union, UnionType):
        rest, *words = (part for part in parts if part is not NoneType)
        if any(value in get_args(part) for part in words):  # float | Literal["auto", "none"]
            return value
        number = (get_args(rest)[0] if get_origin(rest) is Annotated else rest) in (int, float)
        nothing = value is None or (number and value == "none")
        return None if nothing else _convert(value, rest, place)
    if origin is Literal:
        if value not in parts:
            raise _wrong(place, value, f"one of {', '.join(map(str, parts))}", "choose one of these.")
        return value
    if origin is list:  # a single item stands for the list that holds it alone
        return [_convert(item, parts[0], place) for item in (value if isinstance(value, list | tuple) else [value])]
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise _wrong(place, value, f"a list of {len(parts)} numbers", "write it as [0, 1].")
        return tuple(_convert(item, part, place) for item, part in zip(value, parts, strict=True))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise _wrong(place, value, "names with values", "write it as {name: value}; in YAML, quotes make texts.")
        return {name: _convert(item, parts[1], f"{place}: {name}") for name, item in value.items()}
    return _convert_scalar(value, wanted, place)


def _convert_scalar(value: Any, wanted: type, place: str) -> float | str:
    number = math.nan if isinstance(value, bool) else read_number(value)
    fits, allowed, hint = {
        float: (not math.isnan(number), "a finite number", "give a number such as 0.5."),
        int: (number.is_integer(), "a whole number", "give a number such as 3."),  # NaN is none
        bool: (isinstance(value, bool), "true or false", "choose one of these, without quotes."),
        str: (isinstance(value, str), "one text", "give one text; in YAML, quotes turn a number into a text."),
    }[wanted]
    if not fits:
        raise _wrong(place, value, allowed, hint)
    if isinstance(value, str) and "\0" in value:
        raise _wrong(place, value, "a text without null characters", "remove the null characters.")
    return value if isinstance(value, wanted) else wanted(number)


def exact(number: float) -> str:
    """Write a number with all its digits, so that different numbers have different texts: 10.0 is 10, as in YAML."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def _wrong(place: str, value: Any, allowed: str, hint: str) -> OptionError:
    return OptionError(f"{place} must be {allowed}, got {value!r}.", hint)


def read_number(value: Any) -> float:
    """The value as a float; NaN where it is no finite number."""
    try:
        number = math.nan if "_" in str(value) else float(value)  # Python would read 1_0 as 10
    except (OverflowError, TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan
