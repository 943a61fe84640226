"""What was done: data, models, judges, settings, commands and hardware, as markdown."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study import Study

from radq.evaluation.sweep.config import PromptFile, Sweep
from radq.report.tables import number

NOT_RUN = "*Not run.*\n"


def describe_protocol(study: Study) -> str:
    sweeps = [_describe_sweep(name, sweep.config) for name, sweep in study.sweeps.items() if sweep.config is not None]
    parts = [
        "### Sweeps\n",
        "".join(sweeps) or NOT_RUN,
        "### Judges\n",
        _judges(study),
        "### Trained models\n",
        _models(study),
        "### Commands, hardware and time\n",
        _pieces(study),
    ]
    return "\n".join(parts)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Of cells that are markdown already; so many columns at the left hold words, the others numbers."""
    rules = ["---" if column < words else "---:" for column in range(len(header))]
    return "".join(f"| {' | '.join(row)} |".replace("\n", " ") + "\n" for row in (header, rules, *rows))


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def plain(text: str) -> str:
    """Words that mean themselves, also in a table."""
    return re.sub(r"([\\`*_|<])", r"\\\1", text)


# --- sweeps ---


def _describe_sweep(name: str, sweep: Sweep) -> str:
    betas = "; ".join(f"{guide}: {', '.join(f'{s:g}' for s in one.values)}" for guide, one in sweep.guides.items())
    judges = ", ".join(
        f"{judge} ({', '.join(use.metrics)}; reads the {use.reads})" for judge, use in sweep.judges.items()
    )
    facts = {
        "prompts": ", ".join(map(_describe_prompts, sweep.prompts)),
        "base": _short(sweep.base),
        "samples": f"{sweep.samples} of {sweep.max_new_tokens} tokens, temperature {sweep.temperature:g}, "
        f"top-k {_listed(sweep.top_k)}, seeds {_listed(sweep.seeds)}",
        "β": betas,
        "judges": judges,
        "perplexity": "not measured" if sweep.perplexity is None else f"under {_short(sweep.perplexity)}",
        "intervals": f"95%, {sweep.resamples} resamples of the prompts",
    }
    return f"- **{name}**\n" + "".join(f"  - {fact}: {text}\n" for fact, text in facts.items())


def _describe_prompts(part: PromptFile) -> str:
    which = f"{part.limit:,}" if part.limit is not None else "all"
    below = f", toxicity below {part.max_toxicity:g}" if part.max_toxicity is not None else ""
    return f"{which} of {_short(part.file)} ({part.group or 'no group'}{below})"


def _short(name: str) -> str:
    """A hub name as it is, of a path its last part."""
    return f"`{Path(name).name if Path(name).is_absolute() or name.count('/') > 1 else name}`"


def _listed(values: Sequence[Any]) -> str:
    return " and ".join(str(value) for value in values)


# --- models and judges ---


def _judges(study: Study) -> str:
    if not study.judges:
        return NOT_RUN
    rows = [
        [
            name,
            plain(one.get("data", "")),
            _facts(one.get("rows", {})),
            _facts(one.get("metrics", {})),
            plain(one.get("note", "")),
        ]
        for name, one in study.judges.items()
    ]
    return markdown_table(["judge", "data", "rows", "on records it did not see", "note"], rows, words=5)


def _models(study: Study) -> str:
    if not study.models:
        return NOT_RUN
    rows = [
        [
            name,
            _facts(one.get("parameters", {})),
            _facts(one.get("metrics", {})),
            _seconds(one),
            code(one.get("command", "")),
        ]
        for name, one in study.models.items()
    ]
    return markdown_table(["model", "parameters", "metrics on held-out data", "seconds", "command"], rows, words=5)


def _facts(facts: dict[str, Any]) -> str:
    return plain(", ".join(f"{name} {_fact(value)}" for name, value in facts.items()))


def _fact(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _seconds(document: dict[str, Any]) -> str:
    return "–" if document.get("seconds") is None else f"{document['seconds']:,.0f}"


# --- pieces ---


def _pieces(study: Study) -> str:
    if not study.pieces:
        return NOT_RUN
    shared = {
        name: {str(piece.get(name, "")) for piece in study.pieces}
        for name in ("commit", "hardware", "torch", "transformers")
    }
    same = {name: values.pop() for name, values in shared.items() if len(values) == 1}
    columns = ["piece", "seconds", *(name for name in shared if name not in same), "command"]
    rows = [[_piece_cell(piece, column) for column in columns] for piece in study.pieces]
    known = [piece["seconds"] for piece in study.pieces if piece.get("seconds") is not None]
    total = f"{len(study.pieces)} pieces, {sum(known):,.0f} s in all, the longest {max(known, default=0):,.0f} s. "
    everywhere = "; ".join(f"{name} {value}" for name, value in same.items() if value)
    return f"{total}{everywhere}\n\n{markdown_table(columns, rows, words=len(columns))}"


def _piece_cell(piece: dict[str, Any], column: str) -> str:
    if column == "seconds":
        return _seconds(piece)
    return code(piece.get(column, "")) if column == "command" else plain(str(piece.get(column, "")))
