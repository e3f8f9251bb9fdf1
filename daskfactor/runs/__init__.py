"""Run stores: layout, backends, checkpoints, writers, and the trace that is read from one."""
