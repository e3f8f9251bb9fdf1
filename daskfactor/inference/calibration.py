"""One block update to be timed on a worker before an executor is chosen."""

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block
from daskfactor.executors.choice import Trial
from daskfactor.executors.plan import Action, CycleOptions, Op
from daskfactor.inference.base import METRIC, MOMENTS, ConstantStep
from daskfactor.inference.multiplicative import initial_state, mean_floor
from daskfactor.inference.program import LangevinProgram, prepare_state
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF

TINY_STEP = 1e-9


def block_trial(data: BlockedData, model: TweedieNMF | GaussianMF) -> Trial | None:
    """The update of the fullest block from a random start; None if only its size can tell."""
    if not isinstance(model, TweedieNMF):
        return None
    state = initial_state(data, model.n_components, 0, 0)
    prepare_state(state, (*MOMENTS, *METRIC))
    for band in state.bands():
        band.arrays["metric"][:] = 1.0
    program = LangevinProgram(
        likelihood=model.likelihood,
        hyper=Hyperparameters(1.0, 1.0, 1.0),
        floor=mean_floor(data, model.likelihood),
        key=(0, 0),
        step=ConstantStep(TINY_STEP),
    )
    fullest = np.unravel_index(int(np.argmax(data.n_stored)), data.n_stored.shape)
    block = Block(*(int(band) for band in fullest))
    op = Op(Action.UPDATE, block, 0, 0, 1.0, False, CycleOptions())
    return Trial(program, op, state, data)
