"""NVIDIA's own compiler takes every kernel, for two generations of GPUs, where there is none."""

import re

import pytest

from daskfactor.kernels.cuda import source
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie

ARCHITECTURES = ("sm_80", "sm_90")
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
COMMON = {
    f"{make.__name__}-{dtype}": make(dtype)
    for make in (source.steps, source.bands)
    for dtype in ("float32", "float64")
}
OF_LAWS = {
    f"{law}-{kind}": (law, kind)
    for law in LAWS
    for kind, (_, values, zeros, *_) in KINDS.items()
    if values is not None or not LAWS[law].visits_all(zeros)
}
DENSE, SPARSE = {"dense_terms", "dense_fit"}, {"sparse_rows", "sparse_cols", "sparse_fit"}
STEPS = {
    "fill_normals",
    "plain_step",
    "metric_step",
    "moment_step",
    "spiked_step",
    "cir_step",
    "accumulate_moments",
    "kick_drift",
    "refresh",
    "kick_flight",
    "refresh_length",
    "take_share",
}
BANDS = {
    "stack_rows",
    "spread_rows",
    "add_totals",
    "sum_rows",
    "mean_shares",
    "spread_shares",
    "watch_cells",
}


def kernels_of(made, architecture):
    """Compile a source as CuPy does; return its kernels' names, which are those of sections."""
    core = pytest.importorskip("cuda.core", reason="kernels are compiled by NVRTC, of cuda-core")
    macros = [tuple(own[2:].split("=", 1)) for own in made.options if own.startswith("-D")]
    exact = "-fmad=false" in made.options
    assert len(macros) + exact == len(made.options)
    options = core.ProgramOptions(
        arch=architecture, std="c++17", fma=not exact, define_macro=macros
    )
    code = bytes(core.Program(made.text, "c++", options).compile("cubin").code)
    return {own.decode() for own in re.findall(rb"(?<=\0)\.text\.(\w+)(?=\0)", code)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", COMMON)
def test_kernels_that_know_no_law_are_compiled(name, architecture):
    wanted = STEPS if name.startswith("steps") else BANDS
    assert kernels_of(COMMON[name], architecture) == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", OF_LAWS)
def test_kernels_of_laws_are_compiled(name, architecture):
    law, kind = OF_LAWS[name]
    found = kernels_of(source.blocks(LAWS[law], *KINDS[kind]), architecture)
    assert found == BANDS | (DENSE if kind.startswith("dense") else SPARSE)


def test_every_type_of_data_has_a_kernel():
    for values in source.VALUES:
        made = source.blocks(LAWS["beta=1.0"], "float32", values, False, False, 0)
        assert kernels_of(made, "sm_80") == BANDS | DENSE


def test_steps_are_compiled_without_fused_multiply_adds():
    """Which would give other bits than processors do."""
    for dtype in ("float32", "float64"):
        assert "-fmad=false" in source.steps(dtype).options
