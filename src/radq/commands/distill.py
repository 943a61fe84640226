"""radq distill --teacher DIR --data reviews.csv --base gpt2-large --backbone gpt2 --out student

With --teacher-classifier in place of --teacher, a classifier of texts is the teacher.
"""

from dataclasses import dataclass

from radq.commands import train
from radq.errors import OptionError


@dataclass
class Arguments(train.Arguments):
    """Train a RAD-Q on the rewards of a teacher: of the tokens of texts and, with --base, of the candidates that a
    language model has for the next tokens of texts of its own. Labels are not needed; if given, they are used in the
    evaluation. A classifier may be the teacher, too (--teacher-classifier)."""


def defaults(argv: list[str]) -> Arguments:
    return Arguments(**vars(train.defaults(argv)))


def run(arguments: Arguments) -> None:
    if not arguments.has_teacher:
        raise OptionError(
            "there is no teacher.", "give the folder of a RAD-V as --teacher DIR, or --teacher-classifier NAME."
        )
    train.run(arguments)
