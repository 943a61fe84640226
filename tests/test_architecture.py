"""Imports inside radq go one way, between rooms and between modules.

Every `import` statement counts, also inside functions and under TYPE_CHECKING.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "radq"
MAX_LOOSE_MODULES = 8
MAX_ANY = 10
READING = ("cuda_graph", "kv_cache", "prefill", "reading", "slots")
TYPED = ("radq.guides", "radq.decoding", *(f"radq.models.{name}" for name in READING))

# A room imports only from steps above its own. Rooms that stand in one step do not import each other.
STEPS = (
    {"errors"},
    {"files", "numerics", "settings"},
    {"store"},
    {"data"},
    {"sources"},
    {"models"},
    {"guides"},
    {"decoding", "toy"},
    {"judges"},
    {"training"},
    {"registry"},
    {"serving", "hosts", "rank"},
    {"evaluation"},
    {"report"},
    {"benchmark"},
    {"commands"},
    {"radq"},  # the package itself, whose version the command line prints
    {"cli"},
)
STEP_OF = {room: step for step, rooms in enumerate(STEPS) for room in rooms}
ENTRY_POINTS = ("radq", "radq.__main__")  # they import anything, on first use

FILES = {
    ".".join(("radq", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def find_imports(module: str) -> Iterator[str]:
    """Names of the modules of radq that a module imports."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports {node.module!r} relatively: write the full name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (found for found in [name if name in FILES else str(node.module)] if found in FILES)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


IMPORTS = {module: sorted({*find_imports(module)} - {module}) for module in FILES}


def test_few_modules_lie_outside_the_rooms() -> None:
    loose = sorted(file.name for file in PACKAGE.glob("*.py"))
    assert len(loose) <= MAX_LOOSE_MODULES, f"{len(loose)} modules lie in src/radq: {', '.join(loose)}"


def test_every_room_has_a_step() -> None:
    unknown = {room_of(module) for module in FILES} - STEP_OF.keys() - {"__main__"}
    assert not unknown, f"add {', '.join(sorted(unknown))} to STEPS"


@pytest.mark.parametrize("module", [module for module in FILES if module not in ENTRY_POINTS])
def test_imports_go_one_way(module: str) -> None:
    room = room_of(module)
    wrong = [
        target
        for target in IMPORTS[module]
        if room_of(target) != room and STEP_OF.get(room_of(target), len(STEPS)) >= STEP_OF[room]
    ]
    assert not wrong, f"{module} imports {', '.join(wrong)}, which {room!r} must not know"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: targets for module, targets in IMPORTS.items() if module not in ENTRY_POINTS}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("these modules import each other in a circle: " + " ← ".join(error.args[1]))


def test_texts_are_read_and_steered_by_things_with_types() -> None:
    """What is kept of a text passes through many hands, so its type says what it is: `Any` is an exception there."""
    found = [
        f"{module}:{node.lineno}"
        for module, file in FILES.items()
        if module.startswith(TYPED)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert len(found) <= MAX_ANY, f"Any stands at {', '.join(found)}"
