"""The comparison with another package's quantisation names what is missing, and divides both losses."""

import numpy as np
import pytest

from backend.evaluation.scores import Scores
from benchmarks.harness.processes import CannotMeasure
from benchmarks.quantization.peers import GPTQMODEL, python_of, rows_of


def test_a_missing_package_variable_is_named() -> None:
    """Without the package's environment the variable is named with what it must contain."""
    with pytest.raises(CannotMeasure, match=rf"{GPTQMODEL}: the Python of an environment with gptqmodel"):
        python_of({})
    assert python_of({GPTQMODEL: "/somewhere/python"}) == "/somewhere/python"


def test_losses_are_ratios_against_the_other_package() -> None:
    """Half of the other package's rise in perplexity and divergence is a ratio of a half, within the target."""
    reference = scores(nll=1.0, kl=0.0)

    rise, kl = rows_of("gptq", "it 1.0", (scores(1.001, 0.01), scores(1.002, 0.02)), reference)

    assert rise.what == "gptq: rise of the perplexity, against that of it 1.0"
    assert rise.rounds[0] == pytest.approx(0.5, abs=0.001)
    assert rise.target is not None
    assert rise.target.is_met_by(rise.rounds[0])
    assert kl.rounds[0] == pytest.approx(0.5)


def scores(nll: float, kl: float) -> Scores:
    """Scores of 8 equal tokens."""
    return Scores(nll=np.full(8, nll, np.float32), kl=np.full(8, kl, np.float32), agrees=np.full(8, True))
