"""Particles that move: Pólya urns, with Gibbs sweeps over past tokens now and then.

A particle takes a token as in ``polya.py``. At tokens τ that are chosen beforehand it visits
tokens 1 .. τ again, one after the other: takes the token out of its urns, weighs all states,

    w[h] = prod_n (alpha_n + C[m, n, h]) / (A_n + D[m, n, h]),

draws one of them and puts the token back. That leaves p(z_1 .. z_τ | x_1 .. x_τ) as it is,
so that weights need no change, while copies of one particle become different ones. A visit
and a first step are one piece of code.

Estimates stay unbiased only because the weights have no say in when particles move. To move
them whenever they were resampled would replace the states of just those sets of particles
whose weights are uneven, and leave the others as they are: estimates of p(X) of nine tokens
by 8 particles then are 5 % too small on average.

Uniforms have the address (token // 2, particle, batch, tag); see ``philox.py``.

Source: W. R. Gilks and C. Berzuini, "Following a moving target: Monte Carlo inference for
dynamic Bayesian models", JRSS B 63, 2001.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, prefetch
from daskfactor.kernels.resampling import STATES, Scratch, Walk, _copy, look
from daskfactor.kernels.urns import (
    AHEAD,
    CHUNK,
    LANES,
    LARGE,
    SMALL,
    Ints,
    Small,
    Sums,
    Wide,
    _divide,
    _pick,
    _weigh,
    _weigh_two,
    fill_uniforms,
)

Scalar = Any

MOVES = 3
"""What uniforms of sweeps are for, beside the purposes in ``resampling.py``."""
SWEEP = 2**10
"""Tags between two sweeps: room for the rounds."""


class Terms(NamedTuple):
    """What a token's states weigh; R registers, M observed cells, H states.

    ``place``: (M, R), row of a register in a particle's table
    ``scale``: (M,), a token's weight is multiplied by it

    If states are independent of each other but for their sum ("plain"), registers are rows
    of H counts:

    ``base``: (M, R), pseudo-counts, and earlier draws of the same token from the same row
    ``value``: (T + 1,), all factors that depend on a state's number of tokens alone

    and else they are counts and totals anywhere, ``value`` is empty and

    ``alpha``: (R,), pseudo-counts
    ``column``: (R, H), what a state adds to a row
    ``divides``: (R,), 1 for a total
    ``tied``: (R,), 1 if an earlier register may be at the same count
    """

    place: Small
    scale: Wide
    base: Wide
    value: Wide
    alpha: Wide
    column: Small
    divides: NDArray[np.uint8]
    tied: NDArray[np.uint8]
    states: int


class Movers(NamedTuple):
    """P particles.

    ``tables``: (P, W) counts; ``urns``: (P, 4 ceil(H/4)), what a state weighs before its rows
    are looked at; ``balls``: (P, H) its tokens; ``states``: (P, T) of the tokens so far;
    ``log_weights``: (P,); ``orders``: (1, T) or (P, T), the tokens' cells
    """

    tables: Small
    urns: Wide
    balls: Small
    states: NDArray[Any]
    log_weights: Wide
    orders: Small


@jit_exact
def _visit_plain(
    terms: Terms,
    orders: Small,
    tables: Small,
    urns: Wide,
    balls: Small,
    states: NDArray[Any],
    logs: Wide,
    sums: Sums,
    again: bool,
) -> None:
    """Tokens of a few particles, turn by turn: their first step, or ``again``."""
    place, base, scale, value = terms.place, terms.base, terms.scale, terms.value
    w, running, uniforms, product = sums.w, sums.running, sums.uniforms, sums.product
    registers, blocks, last = place.shape[1], running.shape[1] - 1, terms.states
    own, lanes = orders.shape[0] > 1, np.uint64(tables.shape[0])
    kind = states.dtype.type
    tokens = orders.shape[1]
    product[:] = 1.0
    for t in range(tokens):
        if again:
            for lane in range(lanes):
                mine = lane if own else np.uint64(0)
                m = np.uint64(orders[mine, t])
                later = np.uint64(orders[mine, min(t + AHEAD, tokens - 1)])
                for n in range(registers):
                    prefetch(tables, lane, place[later, n])
                h = np.uint64(states[lane, t])
                balls[lane, h] -= 1
                urns[lane, h] = value[balls[lane, h]]
                for n in range(registers):
                    tables[lane, np.uint64(place[m, n]) + h] -= 1
        for lane in range(lanes):
            m = np.uint64(orders[lane if own else np.uint64(0), t])
            o = np.uint64(place[m, 0])
            if registers == 1:
                _weigh(urns, tables, lane, o, base[m, 0], w, running)
            else:
                p = np.uint64(place[m, 1])
                _weigh_two(urns, tables, lane, o, base[m, 0], p, base[m, 1], w, running)
            for n in range(2, registers):
                o = np.uint64(place[m, n])
                _weigh(w, tables, lane, o, base[m, n], w, running)
            h = _pick(w, running, lane, blocks, last, uniforms[lane, t])
            balls[lane, h] += 1
            urns[lane, h] = value[balls[lane, h]]
            for n in range(registers):
                tables[lane, np.uint64(place[m, n]) + h] += 1
            states[lane, t] = kind(h)
            if not again:
                product[lane] *= running[lane, blocks] * scale[m]
                if not SMALL < product[lane] < LARGE:
                    logs[lane] += math.log(product[lane])
                    product[lane] = 1.0
    for lane in range(lanes):
        logs[lane] += math.log(product[lane])  # of one, if again


@inline
def _earlier(place: Small, column: Small, m: Scalar, n: Scalar, h: Scalar) -> Scalar:
    """Balls that earlier draws of the same token have put where draw n now looks."""
    balls = 0
    here = place[m, n] + column[n, h]
    for e in range(n):
        balls += place[m, e] + column[e, h] == here
    return balls


@jit_exact
def _visit_any(
    terms: Terms,
    orders: Small,
    tables: Small,
    bottom: Wide,
    states: NDArray[Any],
    logs: Wide,
    sums: Sums,
    again: bool,
) -> None:
    """As `_visit_plain`, for any model; ``bottom`` serves as scratch."""
    place, alpha, scale, column = terms.place, terms.alpha, terms.scale, terms.column
    divides, tied = terms.divides, terms.tied
    w, running, uniforms, product = sums.w, sums.running, sums.uniforms, sums.product
    registers, blocks, last = place.shape[1], running.shape[1] - 1, terms.states
    own, lanes, kind = orders.shape[0] > 1, tables.shape[0], states.dtype.type
    product[:] = 1.0
    for t in range(orders.shape[1]):
        for lane in range(lanes):
            m = orders[lane if own else 0, t]
            if again:
                z = states[lane, t]
                for n in range(registers):
                    tables[lane, place[m, n] + column[n, z]] -= 1
            w[lane, :last] = 1.0
            bottom[lane, :last] = 1.0
            for n in range(registers):
                at = place[m, n]
                for h in range(last):
                    factor = alpha[n] + tables[lane, at + column[n, h]]
                    if tied[n] == 1:
                        factor += _earlier(place, column, m, n, h)
                    if divides[n] == 1:
                        bottom[lane, h] *= factor
                    else:
                        w[lane, h] *= factor
            _divide(w, bottom, lane, last, running)
            h = _pick(w, running, lane, blocks, last, uniforms[lane, t])
            for n in range(registers):
                tables[lane, place[m, n] + column[n, h]] += 1
            states[lane, t] = kind(h)
            if not again:
                product[lane] *= running[lane, blocks] * scale[m]
                if not SMALL < product[lane] < LARGE:
                    logs[lane] += math.log(product[lane])
                    product[lane] = 1.0
    for p in range(lanes):
        logs[p] += math.log(product[p])  # of one, if again


@jit_exact
def visit(
    terms: Terms,
    movers: Movers,
    particles: tuple[int, int],
    tokens: tuple[int, int],
    again: bool,
    sums: Sums,
) -> None:
    """Give a few particles their next tokens, or draw the states of past ones again.

    Parameters
    ----------
    particles : a stretch of at most LANES
    tokens : a stretch of at most CHUNK
    again : whether the tokens are past ones
    sums : ``uniforms`` holds a number for each of them
    """
    (p, q), (begin, end) = particles, tokens
    orders = (
        movers.orders[p:q, begin:end]
        if movers.orders.shape[0] > 1
        else (movers.orders[0:1, begin:end])
    )
    tables, urns, states = movers.tables[p:q], movers.urns[p:q], movers.states[p:q, begin:end]
    logs = movers.log_weights[p:q]
    if terms.value.size > 0:
        _visit_plain(terms, orders, tables, urns, movers.balls[p:q], states, logs, sums, again)
    else:
        _visit_any(terms, orders, tables, urns, states, logs, sums, again)


@jit_exact
def start_movers(terms: Terms, movers: Movers) -> None:
    """No token yet."""
    movers.tables[:, :] = 0
    movers.balls[:, :] = 0
    movers.log_weights[:] = 0.0
    movers.urns[:, :] = 0.0
    if terms.value.size > 0:
        movers.urns[:, : terms.states] = terms.value[0]


@jit_exact
def _inherit(movers: Movers, parents: Ints, tokens: int) -> None:
    """Particles become copies of their parents, with the tokens so far."""
    own = movers.orders.shape[0] > 1
    for p in range(parents.size):
        q = parents[p]
        if q != p:
            _copy(movers.tables, p, q)
            _copy(movers.urns, p, q)
            _copy(movers.balls, p, q)
            for t in range(tokens):
                movers.states[p, t] = movers.states[q, t]
            if own:
                _copy(movers.orders, p, q)


@jit_exact
def travel(
    terms: Terms,
    movers: Movers,
    way: Walk,
    moves: int,
    cursor: Ints,
    work: float,
    sums: Sums,
    s: Scratch,
) -> None:
    """Go on with a batch from where it stopped, until some work is done or all tokens are.

    The mean weight so far is exp(level) mean(exp(log_weights)): an unbiased estimate.

    Parameters
    ----------
    moves : sweeps after a stretch that ``way.moved`` marks, at least 1
    cursor : (4,), updated: stretch, sweep (0: the first step), particle, token; at first zeros
    work : factors to compute in this call, about a nanosecond each
    """
    sums.w[:, :] = 0.0
    sums.running[:, 0] = 0.0
    size, factors = movers.log_weights.size, terms.states
    if terms.value.size == 0:
        factors *= terms.place.shape[1]
    while work > 0 and cursor[0] < way.edges.size - 1:
        e, sweep, p, t = cursor[0], cursor[1], cursor[2], cursor[3]
        begin, end = 0 if sweep > 0 else way.edges[e], way.edges[e + 1]
        q, stop = min(p + LANES, size), min(t + CHUNK, end)
        tag = way.tag + (STATES if sweep == 0 else MOVES + SWEEP * (e * moves + sweep))
        for lane in range(q - p):
            uniforms = sums.uniforms[lane, : (stop - t + 1) // 2 * 2]
            fill_uniforms(uniforms, t // 2, p + lane, way.batch, tag, way.key)
        visit(terms, movers, (p, q), (t, stop), sweep > 0, sums)
        work -= float((q - p) * (stop - t) * (20 + factors))
        if stop < end:
            cursor[3] = stop
            continue
        if q < size:
            cursor[2], cursor[3] = q, begin
            continue
        again = sweep < moves and way.moved[e] == 1
        if sweep == 0 and look(way, e, movers.log_weights, s):
            _inherit(movers, s.parents, end)
        cursor[2] = 0
        if again:
            cursor[1], cursor[3] = sweep + 1, 0
        else:
            cursor[0], cursor[1], cursor[3] = e + 1, 0, end
