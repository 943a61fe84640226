"""The page's colours: text stays readable on them, and colour-blind people can tell them apart."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

STYLE = Path(__file__).parents[2] / "src" / "radq" / "registry" / "page" / "style.css"

# How people without one kind of cones see linear red, green and blue (Viénot, Brettel and Mollon 1999, rounded; the
# third after Machado, Oliveira and Fernandes 2009).
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array([[0.112, 0.888, 0.0], [0.112, 0.888, 0.0], [0.004, -0.004, 1.0]]),
    "deuteranopia": np.array([[0.293, 0.707, 0.0], [0.293, 0.707, 0.0], [-0.022, 0.022, 1.0]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def themes() -> dict[str, dict[str, str]]:
    """The colours of the light and of the dark page, by their names."""
    light, dark = STYLE.read_text().split("@media (prefers-color-scheme: dark)", 1)
    colours = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
    found = dict(colours.findall(light))
    return {"light": found, "dark": found | dict(colours.findall(dark))}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2: 1 for the same colour, 21 for black on white."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(linear(colour) @ weights) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear red, green and blue as CIE L*a*b* under daylight."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = np.clip(matrix @ rgb, 0, None) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_on_every_surface(theme: str) -> None:
    colours = themes()[theme]
    for ink, back in [
        *product(["ink"], ["back", "card", "well", "said", "low", "high"]),
        *product(["soft"], ["back", "card", "said"]),
    ]:
        assert contrast(colours[ink], colours[back]) >= 4.5, (ink, back)
    assert contrast(colours["button-ink"], colours["button"]) >= 4.5
    assert contrast(colours["warn"], colours["warn-back"]) >= 4.5
    for mark in ("edge", "focus", "low-line", "high-line"):  # of what is no text
        assert contrast(colours[mark], colours["card"]) >= 3, mark


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", list(BLINDNESS))
def test_low_and_high_differ_for_everybody(theme: str, kind: str) -> None:
    colours = themes()[theme]
    seen = {name: lab(np.clip(BLINDNESS[kind] @ linear(colours[name]), 0, 1)) for name in ("low", "high", "card")}
    for one, other in (("low", "high"), ("low", "card"), ("high", "card")):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)
