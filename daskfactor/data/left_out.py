"""Coordinates at places that a stack of dimensions leaves out, as text that attributes can hold.

A coordinate of a stack has values where the data have entries; those of other places, such as the
latitudes of land on a curvilinear grid, are kept beside it, so that maps have all of them.
"""

import base64
import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEFT_OUT = "left_out"
"""Attribute of a coordinate along a stack."""


def written(dims: tuple[str, ...], at: NDArray[np.int64], values: NDArray[Any]) -> str:
    """Values at the places ``at`` of a stack, of a coordinate that has these of its dimensions."""
    return json.dumps({"dims": dims, "at": _packed(at), "values": _packed(values)})


def whole(
    text: str, at: NDArray[np.int64], values: NDArray[Any], sizes: dict[str, int]
) -> tuple[tuple[str, ...], NDArray[Any]] | None:
    """A coordinate on its own dimensions.

    Parameters
    ----------
    text
        What `written` made.
    at, values
        The places that the stack has, and the coordinate there.
    sizes
        Of all dimensions of the stack, in their order.

    Returns
    -------
    tuple or None
        Dimensions and values; None if these are not all places, as of a part of a stack.
    """
    told = json.loads(text)
    others, beside = _unpacked(told["at"]), _unpacked(told["values"])
    shape = tuple(sizes.values())
    if len(at) + len(others) != np.prod(shape):
        return None
    flat = np.empty(len(at) + len(others), np.result_type(values, beside))
    flat[at], flat[others] = values, beside
    dims = [name for name in sizes if name in told["dims"]]
    own = flat.reshape(shape)[tuple(slice(None) if name in dims else 0 for name in sizes)]
    return tuple(told["dims"]), own.transpose([dims.index(name) for name in told["dims"]])


def _packed(values: NDArray[Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {
        "dtype": data.dtype.str,
        "data": base64.b64encode(zlib.compress(data.tobytes())).decode("ascii"),
    }


def _unpacked(stored: dict[str, Any]) -> NDArray[Any]:
    raw = zlib.decompress(base64.b64decode(stored["data"]))
    return np.frombuffer(raw, np.dtype(stored["dtype"]))
