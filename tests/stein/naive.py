"""The Stein matrix as the paper writes it: loops over pairs and explicit vectors."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Point(NamedTuple):
    """One particle and its score, all flat."""

    w: Array
    h: Array
    score_w: Array
    score_h: Array


def part(x, y, c, b):
    """Kernel of one block, its gradient in x, and the trace of mixed second derivatives."""
    gamma, s = (c**2) ** b, c**2 + float(((x - y) ** 2).sum())
    value, gradient = s**b / (2 * gamma), 2 * b * (x - y) * s ** (b - 1) / (2 * gamma)
    r2 = s - c**2
    trace = -2 * b * x.size * s ** (b - 1) - 4 * b * (b - 1) * r2 * s ** (b - 2)
    return value, gradient, trace / (2 * gamma)


def stein_kernel(one, two, kernel, lost=0):
    """Equation 3; ``lost`` dimensions of W are not counted in the trace."""
    scale_w, scale_h = float(kernel.scale_w), float(kernel.scale_h)
    k_w, grad_w, trace_w = part(one.w, two.w, scale_w, kernel.power_w)
    k_h, grad_h, trace_h = part(one.h, two.h, scale_h, kernel.power_h)
    _, _, less = part(np.zeros(lost), np.zeros(lost), scale_w, kernel.power_w)
    if lost:
        s = scale_w**2 + float(((one.w - two.w) ** 2).sum())
        less *= (s / scale_w**2) ** (kernel.power_w - 1)
    scores = one.score_w @ two.score_w + one.score_h @ two.score_h
    into = two.score_w @ grad_w + two.score_h @ grad_h  # s(θ')ᵀ ∇_θ k
    out = -(one.score_w @ grad_w + one.score_h @ grad_h)  # s(θ)ᵀ ∇_θ' k
    return scores * (k_w + k_h) + into + out + trace_w + trace_h - less


def stein_matrix(points, kernel, lost=0):
    return np.array([[stein_kernel(a, b, kernel, lost) for b in points] for a in points])


def points_of(W, H, score_w, score_h):
    stacked = zip(W, H, score_w, score_h, strict=True)
    return [Point(*(np.asarray(one, float).ravel() for one in each)) for each in stacked]
