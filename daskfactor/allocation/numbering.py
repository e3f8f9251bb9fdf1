"""Particles whose hidden states carry the same numbers, so that their tables can be averaged.

Hidden states have no names: any renumbering of them is as probable, and a mean over
particles that differ in it makes all states alike. Particles are renumbered to agree with
one of them, and then with their own mean, one hidden variable after the other, by the
Hungarian method on the overlap of counts

    overlap(a, b) = sum over cells of sqrt(C_a C'_b).
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.models.allocation import AllocationModel

Vector = NDArray[np.float64]

WORK = 2**25
"""Numbers that are gathered from all particles together: a second or two."""
PASSES = 2


def exchangeable(model: AllocationModel) -> tuple[str, ...]:
    """Hidden variables whose values can be renumbered without a change of the law.

    Not those that share an axis of a tied table with another variable, whose numbers they
    take over.
    """
    families = [[model.network.family(name) for name in group] for group in model.groups]
    axes = [set(axis) for group in families for axis in zip(*group, strict=True)]
    return tuple(
        name for name in model.hidden if all(axis == {name} for axis in axes if name in axis)
    )


def matched_mean(
    compiled: CompiledModel, free: tuple[str, ...], counts: NDArray[np.int32], log_weights: Vector
) -> Vector:
    """Mean of the flat counts of particles, renumbered to agree.

    Parameters
    ----------
    compiled
        The compiled problem.
    free
        Hidden variables whose values may be renumbered.
    counts : (P, cells)
    log_weights : (P,)
        Unnormalised. Of many particles only some are taken, by systematic resampling;
        of the largest problems one.
    """
    picks = _picks(log_weights, max(1, WORK // (compiled.row.size * compiled.states)))
    if len(picks) == 1:
        return np.asarray(counts[picks[0]], np.float64)
    place = compiled.row[:, :, None] + compiled.column
    sizes = tuple(compiled.hidden.values())
    axes = [1 + axis for axis, name in enumerate(compiled.hidden) if name in free]
    # Tables that no data index reaches tell of the states' sizes alone.
    telling = np.ptp(compiled.row, axis=0) > 0
    shape = (*place.shape[:2], *sizes)
    reference = counts[picks[0]][place].reshape(shape)[:, telling]
    mean = reference
    for _ in range(PASSES):
        total = np.zeros(shape)
        root = np.sqrt(reference).reshape(-1, *sizes)
        for pick in picks:
            own = counts[pick][place].reshape(shape)
            total += _renumbered(own, telling, root, axes)
        mean = total / len(picks)
        reference = mean[:, telling]
    result = np.zeros(compiled.cells)
    result[place] = mean.reshape(place.shape)
    return result


def _picks(log_weights: Vector, most: int) -> NDArray[np.int64]:
    """Particles for a plain mean, the heaviest first."""
    weights = np.exp(log_weights - log_weights.max())
    cumulative = np.cumsum(weights) / weights.sum()
    count = min(most, len(weights))
    found = np.searchsorted(cumulative, (np.arange(count) + 0.5) / count)
    found = np.minimum(found, len(weights) - 1)
    found[np.argmax(weights[found])], found[0] = found[0], found[np.argmax(weights[found])]
    return found


def _renumbered(
    own: NDArray[np.int32], telling: NDArray[np.bool_], root: Vector, axes: list[int]
) -> NDArray[np.int32]:
    """Counts (M, N, ...) with the values of hidden variables where they overlap most."""
    for _ in range(1 if len(axes) == 1 else PASSES):
        for axis in axes:
            mine = np.sqrt(own[:, telling]).reshape(root.shape)
            overlap = _rows(root, axis) @ _rows(mine, axis).T
            _, order = linear_sum_assignment(overlap, maximize=True)
            own = np.take(own, order, axis=axis + 1)
    return own


def _rows(counts: Vector, axis: int) -> Vector:
    return np.moveaxis(counts, axis, 0).reshape(counts.shape[axis], -1)
