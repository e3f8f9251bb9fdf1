"""Where fits and chains of non-negative models start: at random, but for what is known."""

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.state import ChainState
from daskfactor.inference.multiplicative import initial_state
from daskfactor.models.tweedie import TweedieNMF


def start_state(data: BlockedData, model: TweedieNMF, seed: int, chain: int) -> ChainState:
    """Random positive factors under which μ has about the mean of the data.

    Frozen components have their values, in the grid's order of rows and columns, and
    the free ones are on their scale.
    """
    state = initial_state(data, model.n_components, seed, chain)
    if model.fixed == (None, None):
        return state
    tilt = model.tilt(data.mean)
    for bands, fixed, order, scale in (
        (state.rows, model.fixed[0], data.row_order, tilt),
        (state.cols, model.fixed[1], data.col_order, 1.0 / tilt),
    ):
        for band in bands:
            band.values *= band.values.dtype.type(scale)
            if fixed is not None:
                here = slice(band.offset, band.offset + len(band.values))
                fixed.put(band.values, here if order is None else order[here])
    return state
