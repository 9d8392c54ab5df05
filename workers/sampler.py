"""Draws the tokens of a job from logits. Row by row, so that a job's token does not depend on its neighbours."""

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.constraint import Matcher
from pipeline.errors import DeviceError
from pipeline.job import Job
from pipeline.logprobs import TokenLogprobs
from pipeline.sampling import SamplingParams, uniform
from pipeline.vocabulary import Vocabulary
from workers.devices import Logits

Ids = NDArray[np.intp]

LEAST_LOGPROB = -9999.0  # stands for impossible, as OpenAI has it: JSON has no infinity


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """Of one job. What it draws follows from the job, the tokens so far and the logits: so another worker draws the same.

    In this order: logit_bias and penalties change the logits, what may not come is left out, and from the rest it is drawn
    (see `choose`). A job without all that pays for none of it. Logprobs are of the model's own distribution, before any of it.
    """

    def __init__(self, job: Job, *, eos: Set[int], tokens: Sequence[int] = (), matcher: Matcher | None = None) -> None:
        """matcher: of the job's constraint, where the tokens so far have led it."""
        params = job.sampling
        self._params, self._min_tokens, self._top = params, job.min_tokens, job.logprobs
        self._matcher = matcher
        self._index = len(tokens)
        self._ends = np.array(sorted({*eos, *job.stop_tokens}), dtype=np.intp)
        self._biased = np.array([token for token, _ in params.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._repeats = params.repetition_penalty != 1
        self._counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = dict.fromkeys([*job.prompt, *tokens]) if self._repeats else {}
        self._said = Counter(tokens) if self._counts else Counter()
        self._changes = bool(params.logit_bias) or self._repeats or self._counts

    def draw(self, logits: Logits) -> Drawn:
        """logits `[vocab]`, of the job's next token; they stay as they are.

        Raises DeviceError for logits that are not numbers, ConstraintError if the text cannot be held to its constraint.
        """
        changed = self._changed(logits) if self._changes else logits
        early = self._index < self._min_tokens
        if early or self._matcher is not None:
            _best(logits)  # what is left out must be numbers, too
        if self._matcher is not None:
            allowed = self._allowed(self._matcher, len(logits), early=early)
            token = int(allowed[choose(changed[allowed], self._params, self._index)])
        else:
            if early:
                changed = changed.copy()
                changed[self._ends] = -np.inf  # no weight is as good as being left out, and cheaper
            token = choose(changed, self._params, self._index)
        self._accept(token)
        return Drawn(token, _logprobs(logits, token, self._top) if self._top >= 0 else None)

    def _changed(self, logits: Logits) -> Logits:
        params, changed = self._params, logits.copy()
        changed[self._biased] += self._bias
        if self._repeats:
            seen = np.fromiter(self._seen, dtype=np.intp, count=len(self._seen))
            of_seen, penalty = changed[seen], np.float32(params.repetition_penalty)
            changed[seen] = np.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
        if self._counts:
            said = np.fromiter(self._said, dtype=np.intp, count=len(self._said))
            times = np.fromiter(self._said.values(), dtype=np.float32, count=len(self._said))
            changed[said] -= params.presence_penalty + params.frequency_penalty * times
        return changed

    def _allowed(self, matcher: Matcher, vocabulary: int, *, early: bool) -> Ids:
        """Tokens that may come, in order. The constraint comes before min_tokens: there must be one."""
        mask = _bits(matcher.mask(), vocabulary)
        if early:
            ends = np.zeros(vocabulary, dtype=np.bool_)
            ends[self._ends] = True
            if (rest := mask & ~ends).any():
                mask = rest
        return np.flatnonzero(mask)

    def _accept(self, token: int) -> None:
        self._index += 1
        if self._repeats:
            self._seen[token] = None
        if self._counts:
            self._said[token] += 1
        if self._matcher is not None:
            self._matcher.accept(token)


async def sampler_for(job: Job, vocabulary: Vocabulary, tokens: Sequence[int] = ()) -> Sampler:
    """tokens: what the job has produced already. Raises ConstraintError. A large constraint takes a while to read, and holds
    up neither the event loop nor the device meanwhile."""
    matcher = None
    if job.constraint is not None:
        matcher = await asyncio.to_thread(Matcher, job.constraint, vocabulary, tokens)
    return Sampler(job, eos=vocabulary.eos, tokens=tokens, matcher=matcher)


def choose(logits: Logits, params: SamplingParams, index: int) -> int:
    """logits: of the tokens that may come. index: of the token in its answer. Answers a place in `logits`.

    temperature, then top_k, min_p and top_p (Holtzman et al., "The curious case of neural text degeneration", 2020), then
    the token whose share of the cumulative distribution, in order of token id, holds the job's uniform number.
    Raises DeviceError for logits that are not numbers.
    """
    best = _best(logits)
    if params.temperature == 0:
        return best
    kept = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        kept = np.sort(np.argpartition(logits, -params.top_k)[-params.top_k :])
    shifted = (logits[kept].astype(np.float64) - float(logits[best])) / params.temperature
    weights = np.exp(shifted)
    if params.min_p > 0:  # of the best one's weight, which is 1: the same before top_k and after it
        likely = weights >= params.min_p
        kept, weights = kept[likely], weights[likely]
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        chosen = np.sort(order[:count])
        kept, weights = kept[chosen], weights[chosen]
    cumulative = np.cumsum(weights)
    place = np.searchsorted(cumulative, uniform(params.seed, index) * cumulative[-1], side="right")
    return int(kept[min(int(place), len(kept) - 1)])


def _best(logits: Logits) -> int:
    """Raises DeviceError for logits that are not numbers: an error is better than wrong text."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise DeviceError("the device answered logits that are not finite")
    return best


def _bits(mask: bytes, count: int) -> NDArray[np.bool_]:
    """Logits may be more than the tokenizer has tokens: no bit for those."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=count)
    return bits.view(np.bool_)


def _logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Log-softmax of the logits as they came: of `token`, and of the `top` likeliest ones."""
    shifted = logits - logits.max()
    total = np.log(np.exp(shifted).sum(dtype=np.float64))
    top = min(top, len(logits))
    likeliest = np.argpartition(shifted, -top)[-top:] if top else np.empty(0, dtype=np.intp)

    def logprob(place: int) -> float:
        return max(float(shifted[place] - total), LEAST_LOGPROB)

    best = sorted(((int(place), logprob(place)) for place in likeliest), key=lambda one: (-one[1], one[0]))
    return TokenLogprobs(logprob(token), tuple(best))
