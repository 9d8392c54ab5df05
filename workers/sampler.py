"""Draws a token from logits. Row by row, so that a job's token does not depend on its neighbours."""

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DeviceError
from pipeline.sampling import SamplingParams, uniform


def sample(logits: NDArray[np.float32], params: SamplingParams, index: int) -> int:
    """logits `[vocab]` of one job, index: of the token in its answer.

    temperature, then top_k, then top_p (Holtzman et al., "The curious case of neural text degeneration", 2020), then
    the token whose share of the cumulative distribution, in order of token id, holds the job's uniform number.
    Raises DeviceError for logits that are not numbers: an error is better than wrong text.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise DeviceError("the device answered logits that are not finite")
    if params.temperature == 0:
        return best
    kept = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        kept = np.sort(np.argpartition(logits, -params.top_k)[-params.top_k :])
    shifted = (logits[kept].astype(np.float64) - float(logits[best])) / params.temperature
    weights = np.exp(shifted)
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        chosen = np.sort(order[:count])
        kept, weights = kept[chosen], weights[chosen]
    cumulative = np.cumsum(weights)
    place = np.searchsorted(cumulative, uniform(params.seed, index) * cumulative[-1], side="right")
    return int(kept[min(int(place), len(kept) - 1)])
