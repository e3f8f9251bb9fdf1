"""Marginal likelihoods, and the rank they speak for."""
