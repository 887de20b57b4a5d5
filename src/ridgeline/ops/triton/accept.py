"""The kernel that tries drafts before a token is drawn: the op ACCEPT (ops/draws.py)."""

import triton
import triton.language as tl

from ridgeline.ops.triton.draw import is_kept, is_tried, least_score, number_of, order_of, score_of


@triton.jit
def mass_of(
    logits, trials, first, until, vocabulary, limit, last, least, top, temperature, TRIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weight of the kept tokens of a row, and the sum of weight times score.

    Tokens of the drafts from row `first` on, before row `until`, do not count.
    """
    total, weighted = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for begin in range(0, vocabulary, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < vocabulary
        x = tl.load(logits + index, mask=inside, other=float("-inf"))
        score = score_of(x, top, temperature)
        is_open = inside & is_kept(order_of(x), index, limit, last) & (score >= least)
        is_open = is_open & (is_tried(trials, first, until, index, TRIAL) == 0)
        weight = tl.where(is_open, tl.exp(score), 0.0)
        total += weight
        weighted += tl.where(weight > 0.0, weight * score, 0.0)  # 0 log 0 is 0
    return tl.sum(total, 0), tl.sum(weighted, 0)


@triton.jit
def try_drafts(
    logits, draws, trials, tops, cuts, taken, vocabulary, WORDS: tl.constexpr, TRIAL: tl.constexpr,
    EPSILON: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the first draft of one row that is accepted: taken [rows]; -1 if there is none.

    tops, cuts: results of `cut_rows`. The weight of what rejected drafts leave is added up again for
    each draft after them, because a difference would lose its digits.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    words = draws + row * WORDS
    temperature, least = number_of(words, 4), least_score(words)
    top, first = tl.load(tops + row), row + tl.load(trials + row * TRIAL)
    found = tl.full([], -1, tl.int64)
    if (temperature > 0.0) & (tl.abs(top) < float("inf")) & (first > row):
        limit, last = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        is_typical = tl.load(trials + row * TRIAL + 3) != 0
        total, weighted = mass_of(
            logits, trials, first, first, vocabulary, limit, last, least, top, temperature, TRIAL, BLOCK
        )
        floor = tl.minimum(EPSILON, DELTA * tl.exp(weighted / total) / total)  # e^-entropy
        at = first
        while at >= 0:
            draft = trials + at * TRIAL
            token, step = tl.load(draft + 2), tl.load(draft + 1)
            exists = (token >= 0) & (token < vocabulary)
            x = tl.load(logits + token, mask=exists, other=float("-inf"))
            score = score_of(x, top, temperature)
            is_open = exists & is_kept(order_of(x), token, limit, last) & (score >= least)
            is_open = is_open & (is_typical | (is_tried(trials, first, at, token, TRIAL) == 0))
            share = tl.where(is_open, tl.exp(score), 0.0) / total
            is_taken = tl.where(is_typical, share > floor, number_of(draft, 4) < share)
            found = tl.where(is_taken, token, found)
            at = tl.where(is_taken | (step == 0), -1, at + step)
            if (at >= 0) & (is_typical == 0):
                total, weighted = mass_of(
                    logits, trials, first, at, vocabulary, limit, last, least, top, temperature, TRIAL, BLOCK
                )
    tl.store(taken + row, found)
