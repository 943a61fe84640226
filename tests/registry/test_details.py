import json
from math import nan

from radq.registry.details import describe_scores


def test_scores_of_a_reward_model_that_has_diverged_are_null() -> None:
    rewards = {"good": [0.25, 0.5], "broken": [0.25, nan]}
    found = describe_scores([3, 4], [-1.0], rewards, lambda tokens: [str(token) for token in tokens])
    assert [one["rewards"] for one in found["tokens"]] == [
        {"good": 0.25, "broken": 0.25},
        {"good": 0.5, "broken": None},
    ]
    assert found["rewards"] == {"good": 0.5, "broken": None}
    json.dumps(found, allow_nan=False)
