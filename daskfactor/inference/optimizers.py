"""Optimisers: point estimates on the same engine as the samplers."""

from daskfactor.inference.dsgd import DSGD
from daskfactor.inference.multiplicative import MultiplicativeUpdates

__all__ = ["DSGD", "MultiplicativeUpdates"]
