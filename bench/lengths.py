"""How many tokens: always the same number, or drawn from a distribution."""

import math
import re
from collections.abc import Callable
from random import Random

from bench.errors import Unfit

Draw = Callable[[Random], int]

FORMS = "must be a number as in 128, or uniform:64-256, or lognormal:128,0.5 (median, sigma of the logarithm)"


def lengths(option: str, text: str) -> Draw:
    """Raises Unfit."""
    if found := re.fullmatch(r"(\d+)|uniform:(\d+)-(\d+)", text):
        low, high = (int(found[group] or found[1]) for group in (2, 3))
        if 1 <= low <= high:
            return lambda random: random.randint(low, high)
    if found := re.fullmatch(r"lognormal:(\d+),(\d+(?:\.\d+)?)", text):
        median, sigma = int(found[1]), float(found[2])
        if median >= 1 and sigma <= 5:  # e⁵ is 148 times the median
            return lambda random: max(1, round(random.lognormvariate(math.log(median), sigma)))
    raise Unfit(option, text, FORMS)
