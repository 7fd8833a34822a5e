"""Settings of teachers that contradict each other."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.algorithms.config import AlgorithmConfig
from tests.assembly.test_algorithm import ONLY


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_opd": True}, "use_opd needs one teacher"),
        ({"use_opd": True, "opd_teacher_load": "x", "opd_teacher": "self"}, "use_opd needs one teacher"),
        ({"opd_teacher_load": "x"}, "without use_opd; add it"),
        ({"use_opd": True, "opd_teacher_url": " , "}, "opd_teacher_url holds no address"),
        ({**ONLY, "advantage_estimator": "ppo"}, "`ppo` trains a critic on them"),
        ({**ONLY, "advantage_estimator": "remax"}, "`remax` plays a baseline for them"),
        ({**ONLY, "kl_coef": 0.1}, "kl_coef has no effect with opd_only"),
        ({**ONLY, "custom_advantage_function_path": "a:b"}, "with opd_only, which leaves the rewards out"),
    ],
)
def test_settings_of_a_teacher_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)
