"""The arguments of requests: both forms, the operator's ranges, defaults and limits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import PRAISE
from families import make_reward
from hypothesis import given
from hypothesis import strategies as st

from radq.decoding.config import Steering
from radq.errors import OptionError, UnknownAttributeError
from radq.guides.reward import RewardGuide
from radq.hosts.guidance import read_guidance
from radq.registry.config import ServeConfig
from radq.registry.loaded_guides import LoadedGuides
from radq.registry.strengths import Guidance

CONFIG = ServeConfig(
    guides={
        "toxicity": "models/tox:toxicity=-50",
        "praise": {"guide": "models/praise:praise", "range": [0, 10]},
        "gedi": "models/gedi:omega=30,filter_p=0.8",
    }
)


def test_arguments_become_a_guidance() -> None:
    assert read_guidance(CONFIG, None, 1.0) is None
    assert read_guidance(CONFIG, {"other_plugin": {}}, 1.0) is None
    default = read_guidance(CONFIG, {"radq_guide": "toxicity"}, 0.7)
    assert default == Guidance({"toxicity": -50.0}, Steering(temperature=0.7))
    full = {"radq_guide": "toxicity", "radq_beta": 3, "radq_top_k": 7, "radq_top_p": 0.9, "radq_kl_budget": 1}
    assert read_guidance(CONFIG, full, 0.0) == Guidance({"toxicity": 3.0}, Steering(7, 0.9, 0.0, 1.0))
    texts = {name: str(value) for name, value in full.items()}  # some clients can send nothing else
    assert read_guidance(CONFIG, texts, 1e-6) == read_guidance(CONFIG, full, 0.0)
    assert read_guidance(CONFIG, {"radq_guide": "toxicity", "radq_beta": [3]}, 1.0) == Guidance(
        {"toxicity": 3.0}, Steering()
    )


def test_several_guides_add_up_in_one_text() -> None:
    text = "toxicity=-20, praise=5,kl_budget=0.25,top_k=9"
    expected = Guidance({"toxicity": -20.0, "praise": 5.0}, Steering(9, kl_budget=0.25))
    assert read_guidance(CONFIG, {"radq": text}, 1.0) == expected
    assert (
        read_guidance(CONFIG, {"radq": {"toxicity": -20, "praise": 5, "kl_budget": 0.25, "top_k": 9}}, 1.0) == expected
    )
    suggested = read_guidance(CONFIG, {"radq": "toxicity,gedi", "radq_top_p": 0.5}, 1.0)
    assert suggested == Guidance({"toxicity": -50.0, "gedi": 30.0}, Steering(top_p=0.5))
    off: list[dict[str, Any]] = [{"radq": "toxicity,kl_budget=none"}]
    off += [{"radq_guide": "toxicity", "radq_kl_budget": none} for none in ("none", None)]
    for arguments in off:
        free = read_guidance(CONFIG, arguments, 1.0)
        assert free is not None
        assert free.steering.kl_budget is None


@pytest.mark.parametrize("arguments", [{"radq": "praise=strong"}, {"radq_guide": "praise", "radq_beta": "60%"}])
def test_a_budget_may_stand_beside_a_calibrated_strength(arguments: dict[str, Any]) -> None:
    """In place of the one that the strength was calibrated with."""
    config = ServeConfig(guides={"praise": "models/praise:praise"})
    vars(config)["calibrations"] = {"praise": PRAISE}  # as if it were read from the folder
    calibrated = read_guidance(config, arguments, 1.0)
    assert calibrated is not None
    assert calibrated.strengths["praise"] != 0
    found = read_guidance(config, {**arguments, "radq_kl_budget": 0.25}, 1.0)
    assert found == replace(calibrated, steering=replace(calibrated.steering, kl_budget=0.25))


def test_defaults_of_the_operator_hold_for_requests_that_name_nothing() -> None:
    guides = {"toxicity": {"guide": "models/tox:toxicity", "default": -30}, "praise": "models/praise:praise=4"}
    config = ServeConfig(guides=guides)
    unnamed = read_guidance(config, None, 1.0)
    assert unnamed == Guidance({"toxicity": -30.0}, Steering())
    both = read_guidance(config, {"radq_guide": "praise"}, 1.0)
    assert both is not None
    assert both.strengths == {"toxicity": -30.0, "praise": 4.0}
    off = read_guidance(config, {"radq": "toxicity=0"}, 1.0)
    assert off is not None
    assert off.strengths == {}


def test_details_read_guides_that_do_not_steer() -> None:
    """The server's middleware gives requests a ticket, under which it asks for their details."""
    text = {"radq": "toxicity=0,praise=3,details=1,kl_budget=none", "radq_ticket": "1", "radq_seed": 5}
    found = read_guidance(CONFIG, text, 1.0)
    assert found == Guidance({"toxicity": 0.0, "praise": 3.0}, Steering(kl_budget=None), details=True)
    plain = read_guidance(CONFIG, text | {"radq": "toxicity=0,praise=3,details=0,kl_budget=none"}, 1.0)
    assert plain == Guidance({"praise": 3.0}, Steering(kl_budget=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"radq_guide": "models/tox"},
            "there is no guide 'models/tox'. hint: the registered guides are toxicity, praise",
        ),
        ({"radq_guide": "models/tox:toxicity=-50"}, "there is no guide"),
        ({"radq_guide": ["toxicity"]}, "there is no guide"),
        ({"radq_beta": 3}, "there is no guide null"),
        ({"radq": "models/tox:toxicity=-50"}, "there is no guide"),
        ({"radq": "__import__('os')"}, "there is no guide"),
        ({"radq": 3}, "must give names"),
        ({"radq": "toxicity", "radq_guide": "toxicity"}, "both radq and radq_guide"),
        ({"radq": "toxicity,top_k=3", "radq_top_k": 3}, "top_k twice"),
        ({"radq": "toxicity,details=5"}, "tells no details"),
        ({"radq_guide": "toxicity", "radq_gide": 1}, "no argument 'radq_gide'. hint: choose from radq, radq_guide"),
        ({"radqguide": "toxicity"}, "no argument 'radqguide'"),
        ({"RADQ_guide": "toxicity"}, "no argument 'RADQ_guide'"),
        ({"radq_guide": "toxicity", "radq_beta": "high"}, "radq_beta must be a number, got 'high'"),
        ({"radq_guide": "toxicity", "radq_beta": [1, 2]}, "got [1, 2]"),
        ({"radq_guide": "toxicity", "radq_beta": float("nan")}, "got nan"),
        ({"radq_guide": "toxicity", "radq_beta": True}, "got true"),
        ({"radq_guide": "toxicity", "radq_beta": 1e39}, "toxicity must be from -200 to 200"),
        ({"radq_guide": "toxicity", "radq_beta": "1e999"}, "radq_beta must be a number"),
        ({"radq": "toxicity=201"}, "toxicity must be from -200 to 200"),
        ({"radq": "praise=-1"}, "praise must be from 0 to 10"),
        ({"radq": "praise"}, "no suggested strength"),
        ({"radq_guide": "toxicity", "radq_top_k": 1.5}, "whole number"),
        ({"radq_guide": "toxicity", "radq_top_k": 0}, "from 1 to 1024, got 0"),
        ({"radq_guide": "toxicity", "radq_top_k": 2000}, "from 1 to 1024"),
        ({"radq_guide": "toxicity", "radq_top_p": 0}, "got 0"),
        ({"radq_guide": "toxicity", "radq_kl_budget": -1}, "got -1"),
    ],
)
def test_what_a_client_gets_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        read_guidance(CONFIG, arguments, 1.0)
    assert message in str(error.value)


_TEXTS = st.text("radqtoxicity=,.0123456789-e /", max_size=20)
_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS | st.lists(st.floats(), max_size=3)
_NAMES = st.sampled_from(["radq", "radq_guide", "radq_beta", "radq_top_k", "radq_top_p", "radq_kl_budget", "radq_x"])


@given(st.dictionaries(_NAMES, _VALUES | st.just("toxicity"), max_size=4))
def test_any_arguments_are_read_or_refused_with_a_reason(arguments: dict[str, Any]) -> None:
    found: Guidance | OptionError | None
    try:
        found = read_guidance(CONFIG, arguments, 1.0)
    except OptionError as error:
        found = error
    if isinstance(found, OptionError):
        assert found.hint
        assert "models/" not in str(found)  # no folder of the server
    else:
        assert (found is None) == (not arguments)


def test_registered_guides_share_models(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    make_reward("q", lm_folders["gpt2"]).save_pretrained(tmp_path / "q")
    guides = {
        "nice": f"{tmp_path / 'q'}:nice=1",
        "rude": f"{tmp_path / 'q'}:rude=2",
        "kind": f"{tmp_path / 'q'}:nice=3",
    }
    loaded = LoadedGuides.load(ServeConfig(guides=guides).guides)
    assert len(loaded.guides) == 1
    assert isinstance(loaded.guides[0], RewardGuide)
    assert loaded.guides[0].attributes == ("nice", "rude")
    assert loaded.strengths({"nice": 4.0, "rude": 5.0, "kind": 6.0}) == {0: [10.0, 5.0]}
    assert loaded.strengths({"rude": 5.0}) == {0: [0.0, 5.0]}
    with pytest.raises(UnknownAttributeError):
        LoadedGuides.load(ServeConfig(guides={"wrong": f"{tmp_path / 'q'}:nicer=1"}).guides)


def test_requests_are_read_without_torch() -> None:
    code = "import radq.hosts.guidance, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
