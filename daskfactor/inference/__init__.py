"""Runs: what a call of ``sample`` does, from options to segments to results."""
