"""The commands of the command line: modules with `Arguments`, whose docstrings are the help, and `run`.

A module with subcommands has the arguments and functions of all of them in `SUBCOMMANDS` instead. It may also have
`defaults`, which reads the defaults of the options, for example from a YAML file. Imports of torch, pandas and scipy
stand inside functions, so that help is shown at once, and mistakes before. Numbers outside the `Range` of their option
are refused before `run` is called.

Options that several commands have are the types below.
"""

from pathlib import Path
from typing import Annotated

import tyro

from radq.settings import Range

AsJson = Annotated[bool, tyro.conf.arg(help="Print the result as JSON, without progress bars.")]
Base = Annotated[str, tyro.conf.arg(help="Language model to steer: a hub name, a folder, or embedded.")]
Cache = Annotated[
    Path | None, tyro.conf.arg(help="Folder in which texts and scores are kept; by default in the user's cache.")
]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, cuda:1, …; auto uses a GPU if there is one.")]
Files = Annotated[
    list[str],
    tyro.conf.arg(help="Files (csv, tsv, jsonl, parquet, also .gz, .xz, .zst) or hub data sets (name or name:split)."),
]
Guides = Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="DIR:ATTR=BETA,…")]
LabelMap = Annotated[
    str,
    tyro.conf.arg(
        help="Numbers of words, such as bad=0,ok=0.5,good=1. By default pairs such as no and yes are 0 and 1, and a "
        "trained model knows its own."
    ),
]
LabelRange = Annotated[
    tuple[float, float] | None,
    tyro.conf.arg(
        help="Lowest and highest label, which are mapped to 0 and 1. By default numbers outside 0 to 1 are mapped by "
        "their own range without outliers, or as in the training of the model."
    ),
]
Limit = Annotated[int | None, Range(1)]
Texts = Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")]
