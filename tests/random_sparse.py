"""Random sparse matrices, whatever SciPy calls the generator that it takes."""

from inspect import signature

from scipy import sparse

GENERATOR = "rng" if "rng" in signature(sparse.random_array).parameters else "random_state"


def random_array(shape, *, rng, **options):
    """As `scipy.sparse.random_array`."""
    return sparse.random_array(shape, **{GENERATOR: rng}, **options)
