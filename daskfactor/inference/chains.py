"""Which kind of chain goes with which model."""

from daskfactor.inference.chain import ChainRun, Setting
from daskfactor.inference.gaussian_chain import GaussianChain
from daskfactor.inference.hmc_chain import HMCChain
from daskfactor.inference.samplers import HMC
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.models.gaussian import GaussianMF


def make_chain(setting: Setting, number: int) -> ChainRun:
    """A chain of the setting's model, not started yet."""
    if isinstance(setting.model, GaussianMF):
        return GaussianChain(setting, number)
    if isinstance(setting.sampler, HMC):
        return HMCChain(setting, number)
    return TweedieChain(setting, number)
