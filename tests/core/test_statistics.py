"""`Sample` has the mean and error of scipy, `student_t` its quantiles; differences are paired by key."""

import math

import numpy as np
import pytest
import scipy.stats
from scipy.special import stdtrit

from jackpot.core.statistics import Estimate, Sample, paired_differences, student_t

VALUES = (0.31, 0.4, 0.27, 0.55, 0.38)


def test_a_sample_has_the_mean_and_error_of_scipy() -> None:
    sample = Sample(VALUES)

    assert sample.deviation == pytest.approx(np.std(VALUES, ddof=1), rel=1e-12)
    assert sample.estimate.value == pytest.approx(np.mean(VALUES), rel=1e-12)
    assert sample.estimate.error == pytest.approx(scipy.stats.sem(VALUES), rel=1e-12)


def test_a_single_value_has_no_error() -> None:
    sample = Sample((0.3,))

    assert sample.deviation is None
    assert sample.estimate == Estimate(value=0.3, error=None)


def test_differences_are_paired_by_key_and_not_by_order() -> None:
    first_values = {1: 0.5, 2: 0.25, 3: 0.75}
    second_values = {3: 0.5, 4: 0.0, 1: 0.375}

    assert paired_differences(first_values, second_values) == Sample((0.125, 0.25))  # of the keys 1 and 3
    assert paired_differences(first_values, {4: 0.0}) is None


def test_an_estimate_shows_an_error_where_it_is_a_number() -> None:
    assert Estimate(value=0.914, error=0.0213).text == "0.91 ± 0.02"
    assert Estimate(value=0.914, error=None).text == "0.91"
    assert Estimate(value=0.914, error=math.nan).text == "0.91"


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 100])
def test_students_quantile_is_that_of_every_interval(degrees: int) -> None:
    is_exact = degrees in (1, 2, 4)  # of 2, 3 and 5 seeds
    expected_quantile = stdtrit(degrees, 0.975)  # of a two-sided interval of 95 %

    assert student_t(degrees) == pytest.approx(expected_quantile, rel=1e-9 if is_exact else 1.3e-3)
