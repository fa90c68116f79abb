"""How the process is put together."""

import msgspec
import pytest

from cache.semantic.judge import fitted
from cache.semantic.service.config import Config
from cache.semantic.service.service import judge_name
from gateway.settings.cache import SemanticSettings


def _config(judge: str, judge_model: str = "") -> Config:
    said = msgspec.structs.asdict(SemanticSettings(judge=judge, judge_model=judge_model))
    used = {name: value for name, value in said.items() if name in Config.__struct_fields__}
    return Config(**{**used, "model_key": "", "judge_key": "", "socket": "", "redis": "", "models": ""})


@pytest.mark.parametrize(
    ("coefficient", "other"),
    [
        ("INTERCEPT", 1.0),
        ("COEFFICIENTS", (1.0,) * 7),
        ("SAME_ABOVE", 9.0),
        ("DISAGREEMENT", 1.0),
        ("DISAGREEMENT_OF_SCORE", 1.0),
    ],
)
def test_a_judge_that_is_fitted_anew_shares_no_pairs_with_the_former(
    monkeypatch: pytest.MonkeyPatch, coefficient: str, other: object
) -> None:
    """What showed the former's errors says nothing of its own; a model's name does not depend on the fit."""
    embedding, model = _config("embedding"), _config("http://judge/v1", "a-model")
    before = judge_name(embedding, "encoder"), judge_name(model, "encoder")
    assert before == (judge_name(embedding, "encoder"), "judge:http://judge/v1:a-model")
    monkeypatch.setattr(fitted, coefficient, other)
    assert judge_name(embedding, "encoder") != before[0]
    assert judge_name(model, "encoder") == before[1]
    assert judge_name(embedding, "another") != judge_name(embedding, "encoder")
