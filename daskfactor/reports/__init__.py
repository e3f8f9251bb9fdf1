"""A page about a run, for people who were not there."""
