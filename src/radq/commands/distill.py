"""radq distill --teacher DIR --data reviews.csv --backbone gpt2 --out student"""

from dataclasses import dataclass

from radq.commands import train
from radq.errors import OptionError


@dataclass
class Arguments(train.Arguments):
    """Train a RAD-Q to give the rewards of a RAD-V. Labels are not needed; given ones are used for evaluation."""


def defaults(argv: list[str]) -> Arguments:
    return Arguments(**vars(train.defaults(argv)))


def run(arguments: Arguments) -> None:
    if not arguments.teacher:
        raise OptionError("there is no teacher.", "give --teacher DIR, a RAD-V folder.")
    train.run(arguments)
