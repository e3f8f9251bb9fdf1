"""Which kind of chain goes with which model."""

from daskfactor.runs.chain import ChainRun, Setting
from daskfactor.runs.tweedie import TweedieChain


def make_chain(setting: Setting, number: int) -> ChainRun:
    """A chain of the setting's model, not started yet."""
    return TweedieChain(setting, number)
