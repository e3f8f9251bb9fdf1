"""Which kind of chain goes with which model."""

from daskfactor.models.gaussian import GaussianMF
from daskfactor.runs.chain import ChainRun, Setting
from daskfactor.runs.gaussian import GaussianChain
from daskfactor.runs.hmc import HMCChain
from daskfactor.runs.tweedie import TweedieChain
from daskfactor.samplers import HMC


def make_chain(setting: Setting, number: int) -> ChainRun:
    """A chain of the setting's model, not started yet."""
    if isinstance(setting.model, GaussianMF):
        return GaussianChain(setting, number)
    if isinstance(setting.sampler, HMC):
        return HMCChain(setting, number)
    return TweedieChain(setting, number)
