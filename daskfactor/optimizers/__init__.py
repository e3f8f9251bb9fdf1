"""Optimisers: point estimates on the same engine as the samplers."""

from daskfactor.optimizers.dsgd import DSGD
from daskfactor.optimizers.multiplicative import MultiplicativeUpdates

__all__ = ["DSGD", "MultiplicativeUpdates"]
