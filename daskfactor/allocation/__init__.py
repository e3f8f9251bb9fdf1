"""The Bayesian allocation model on data: counts, urns, simulation, exact sums and estimates."""
