"""The comparison with another package's quantisation says what is missing, and divides what both have lost."""

import numpy as np
import pytest

from backend.evaluation.scores import Scores
from benchmarks.harness.processes import CannotMeasure
from benchmarks.quantization.peers import GPTQMODEL, python_of, rows_of


def test_an_environment_without_the_package_is_told_what_to_name() -> None:
    """The variable is named, and what it has to say."""
    with pytest.raises(CannotMeasure, match=rf"{GPTQMODEL}: the Python of an environment with gptqmodel"):
        python_of({})
    assert python_of({GPTQMODEL: "/somewhere/python"}) == "/somewhere/python"


def test_what_is_lost_is_divided_by_what_the_other_loses() -> None:
    """Half the rise in perplexity and half the divergence is a ratio of about a half, within the target."""
    reference = scores(nll=1.0, kl=0.0)

    rise, kl = rows_of("gptq", "it 1.0", (scores(1.001, 0.01), scores(1.002, 0.02)), reference)

    assert rise.what == "gptq: rise of the perplexity, against that of it 1.0"
    assert rise.rounds[0] == pytest.approx(0.5, abs=0.001)
    assert rise.target is not None
    assert rise.target.is_met_by(rise.rounds[0])
    assert kl.rounds[0] == pytest.approx(0.5)


def scores(nll: float, kl: float) -> Scores:
    """Of 8 tokens, all alike."""
    return Scores(nll=np.full(8, nll, np.float32), kl=np.full(8, kl, np.float32), agrees=np.full(8, True))
