"""Results of a sweep grouped into curves."""

from math import isnan

from sweep_folders import make_result

from radq.evaluation.estimates import Estimate
from radq.report.curves import find_curves
from radq.report.results import NAN


def test_curves_run_over_beta_and_average_seeds() -> None:
    results = [
        make_result(beta=beta, seed=seed, metrics={"avg_max": Estimate(beta + seed, beta, beta + 2 * seed)})
        for beta in (-100.0, -10.0, -50.0)
        for seed in (0, 1)
    ]
    (curve,) = find_curves(results)
    assert curve.label == "rad-q, k=20"
    assert [step.label for step in curve.steps] == ["-10", "-50", "-100"]
    assert curve.steps[0].estimate("avg_max") == Estimate(-9.5, -10.0, -9.0)
    assert isnan(curve.steps[0].estimate("mauve").value)


def test_seeds_without_a_value_are_left_out_of_the_mean() -> None:
    known, unknown = Estimate(0.5, 0.4, 0.6), Estimate(NAN, NAN, NAN)
    (curve,) = find_curves([make_result(seed=n, metrics={"mauve": one}) for n, one in enumerate([unknown, known])])
    assert curve.steps[0].estimate("mauve") == known


def test_settings_make_curves_of_their_own() -> None:
    cells = [
        make_result(guide="none", unguided=True, beta=None),
        *(make_result(top_k=k, beta=beta) for k in (20, 40) for beta in (10.0, 50.0)),
        make_result(top_k=None, top_p=0.9),
        *(make_result(guide="gedi", beta=30.0, kl_budget=budget) for budget in (0.5, 0.1)),
        *(make_result(guide="dexperts", beta=beta, kl_budget=b) for b in (0.5, 0.1) for beta in (1.0, 2.0)),
    ]
    found = {curve.label: [step.label for step in curve.steps] for curve in find_curves(cells)}
    assert found == {
        "none (unguided), k=20": [""],
        "rad-q, k=20": ["10", "50"],
        "rad-q, k=40": ["10", "50"],
        "rad-q, p=0.9": ["10"],
        "gedi, k=20, KL budget": ["KL 0.1", "KL 0.5"],
        "dexperts, k=20, KL≤0.5": ["1", "2"],
        "dexperts, k=20, KL≤0.1": ["1", "2"],
    }


def test_requests_are_steps_in_their_order() -> None:
    asked = [make_result(guide="asked", beta=None, ask=number, cell=f"asked ask={number}") for number in (2, 1)]
    (curve,) = find_curves(asked)
    assert [step.title for step in curve.steps] == ["ask=1", "ask=2"]
