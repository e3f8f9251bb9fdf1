"""NVIDIA's own compiler takes every kernel, for two generations of GPUs, where there is none."""

import re

import pytest

from daskfactor.kernels.cuda import source
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie

LAWS = {f"beta={beta}": Tweedie(beta) for beta in (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 2.5)}
LAWS |= {"negative-binomial": NegativeBinomial(0.7)}
KINDS = {
    "dense": ("float32", "float32", False, False, 0),
    "dense-uint8": ("float32", "uint8", False, False, 0),
    "dense-weights-float64": ("float64", "float64", False, True, 0),
    "sparse": ("float32", None, False, False, 100),
    "sparse-weights-float64": ("float64", None, False, True, 7),
    "sparse-zeros": ("float32", None, True, False, 64),
    "sparse-zeros-weights": ("float32", None, True, True, 1),
}
COMMON = [("steps", "float32", "sm_80"), ("steps", "float64", "sm_90")]
COMMON += [("bands", "float32", "sm_90"), ("bands", "float64", "sm_80")]
OF_LAWS = [(law, kind, "sm_80") for law in LAWS for kind in ("dense", "sparse")]
OF_LAWS += [("beta=1.0", kind, "sm_80") for kind in KINDS if kind not in ("dense", "sparse")]
OF_LAWS += [("beta=2.0", kind, "sm_90") for kind in ("sparse-zeros", "sparse-zeros-weights")]
OF_LAWS += [(law, "dense-weights-float64", "sm_90") for law in ("beta=0.3", "negative-binomial")]
"""What differs: laws by their arithmetic, kinds of blocks by what is around it."""
DENSE = {"dense_terms", "dense_fit", "dense_row_fits", "dense_col_fits"}
SPARSE = {"sparse_rows", "sparse_cols", "sparse_fit", "sparse_row_fits", "sparse_col_fits"}
STEPS = {
    *("fill_normals", "plain_step", "metric_step", "moment_step", "spiked_step"),
    *("accumulate_moments", "kick_drift", "drift", "refresh", "take_share"),
    *("kick_flight", "flight", "refresh_length"),
    *("leapfrog_kick", "leapfrog_drift", "warped_kick", "warped_drift", "average_square"),
    "level_places",
}
BANDS = {
    *("take_products", "stack_rows", "spread_rows", "add_totals", "sum_rows", "mean_shares"),
    "watch_cells",
}


def kernels_of(made, architecture):
    """Compile a source as CuPy does; return its kernels' names, which are those of sections."""
    core = pytest.importorskip("cuda.core", reason="kernels are compiled by NVRTC, of cuda-core")
    macros = [tuple(own[2:].split("=", 1)) for own in made.options if own.startswith("-D")]
    exact = "-fmad=false" in made.options
    assert len(macros) + exact == len(made.options)
    rules = {"arch": architecture, "std": "c++17", "fma": not exact, "define_macro": macros}
    program = core.Program(made.text, "c++", core.ProgramOptions(**rules))
    code = bytes(program.compile("cubin").code)
    return {own.decode() for own in re.findall(rb"(?<=\0)\.text\.(\w+)(?=\0)", code)}


@pytest.mark.quick("steps-float32-sm_80", "bands-float64-sm_80")
@pytest.mark.parametrize(("name", "dtype", "architecture"), COMMON)
def test_kernels_that_know_no_law_are_compiled(name, dtype, architecture):
    wanted = STEPS if name == "steps" else BANDS
    assert kernels_of(getattr(source, name)(dtype), architecture) == wanted


@pytest.mark.quick(
    "beta=1.0-dense-uint8-sm_80",
    "beta=1.0-sparse-zeros-weights-sm_80",
    "beta=0.3-dense-weights-float64-sm_90",
    "negative-binomial-sparse-sm_80",
    "beta=2.0-sparse-zeros-sm_90",
)
@pytest.mark.parametrize(("law", "kind", "architecture"), OF_LAWS)
def test_kernels_of_laws_are_compiled(law, kind, architecture):
    dtype, *rest = KINDS[kind]
    found = kernels_of(source.blocks(LAWS[law], dtype, *rest), architecture)
    assert found == BANDS | (DENSE if kind.startswith("dense") else SPARSE)


@pytest.mark.parametrize(
    ("values", "zeros"), [("float32", False), ("uint8", False), (None, False), (None, True)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_that_draw_entries_are_compiled(dtype, values, zeros):
    found = kernels_of(source.draws(dtype, values, zeros), "sm_80")
    assert found == {"draw_entries", "order_draws", "place_draws", "draw_starts"}


@pytest.mark.quick("bool")
@pytest.mark.parametrize("values", ["bool", "int8", "uint64"])
def test_data_of_other_types_have_kernels(values):
    made = source.blocks(LAWS["beta=2.0"], "float32", values, False, False, 0)
    assert kernels_of(made, "sm_80") == BANDS | DENSE


def test_steps_are_compiled_without_fused_multiply_adds():
    """Which would give other bits than processors do."""
    for dtype in source.NAMES.values():
        assert "-fmad=false" in source.steps(dtype).options
