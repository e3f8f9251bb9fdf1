"""Models: densities, gradients and predictive intervals, in plain NumPy and SciPy."""
