"""Values of a dataclass's fields, checked against their types and ranges before anything is done with them.

    batch_size: Annotated[int, Range(1)] = 100

A value of another type is refused by name, and so is a number outside its range, NaN or infinity.
"""

import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from radq.errors import OptionError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless they are left out."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    without_high: bool = False
    also: int | None = None  # one number outside the range, which has a meaning of its own

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.without_low else number >= self.low
        below = number < self.high if self.without_high else number <= self.high
        return (above and below) or number == self.also

    def __str__(self) -> str:
        low = f"more than {self.low:,}" if self.without_low else f"{self.low:,} or more"
        high = f"{'less than' if self.without_high else 'at most'} {self.high:,}"
        parts = [low] if math.isinf(self.high) else [high] if math.isinf(self.low) else [low, high]
        return " and ".join(parts) + ("" if self.also is None else f", or {self.also}")


COUNT = Range(1, 2**31 - 1)


def check_values(settings: Any) -> None:
    """Refuse values of a dataclass of another type or outside their range; 3.0 becomes 3 where a whole one is meant."""
    for name, wanted in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        setattr(settings, name, convert(value, wanted, f"{name} is {value!r}."))


def convert(value: Any, wanted: Any, problem: str) -> Any:
    """The value as its type wants it; YAML reads 1e-5 as text and knows no tuples. `problem` says what it is."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        value = convert(value, parts[0], problem)
        for limits in parts[1:]:
            if isinstance(limits, Range) and value is not None and value not in limits:
                raise OptionError(problem, f"give {limits}.")
        return value
    if origin in (Union, UnionType):
        (rest,) = (part for part in parts if part is not NoneType)
        return None if value is None else convert(value, rest, problem)
    if origin is Literal:
        if value not in parts:
            raise OptionError(problem, f"choose one of {', '.join(map(str, parts))}.")
        return value
    return CONVERSIONS[origin or wanted](value, parts, problem)


def _number(value: Any, parts: Any, problem: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(problem, "finite numbers are needed there.")
    return number


def _integer(value: Any, parts: Any, problem: str) -> int:
    number = _number(value, parts, problem)
    if number != int(number):
        raise OptionError(problem, "give a whole number.")
    return value if isinstance(value, int) else int(number)


def _boolean(value: Any, parts: Any, problem: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(problem, "give true or false.")
    return value


def _text(value: Any, parts: Any, problem: str) -> str:
    if not isinstance(value, str):
        raise OptionError(problem, "give one text; in YAML, quotes make a text of a number.")
    if "\0" in value:
        raise OptionError(problem, "null characters have no place there.")
    return value


def _list(value: Any, parts: Any, problem: str) -> list[Any]:
    """A single text stands for the list of it."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise OptionError(problem, "give a list.")
    return [convert(item, parts[0], problem) for item in values]


def _tuple(value: Any, parts: Any, problem: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(parts):
        raise OptionError(problem, f"give a list of {len(parts)}; numbers are needed there.")
    return tuple(convert(item, part, problem) for item, part in zip(value, parts, strict=True))


def _dictionary(value: Any, parts: Any, problem: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise OptionError(problem, "give names with values.")
    return value


CONVERSIONS = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _text,
    list: _list,
    tuple: _tuple,
    dict: _dictionary,
}
