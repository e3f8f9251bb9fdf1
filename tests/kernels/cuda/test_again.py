"""What a device was asked for is asked for once more; copies wait for what read the memory."""

import numpy as np
import pytest

from daskfactor.kernels.cuda import blocks
from daskfactor.kernels.cuda.blocks import Part, Pass, Side
from daskfactor.kernels.cuda.device import Device
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.cuda import fake


def part_of(device):
    """Two blocks of unlike sizes."""
    rows = Side(np.array([0, 4]), np.array([4, 3]), 7)
    cols = Side(np.array([5, 0]), np.array([2, 5]), 7)
    V = np.random.default_rng(0).poisson(3.0, (2, 4, 5)).astype(np.float32)
    return Part(rows, cols, {"values": device.put(V)}, None)


def factors_of(device):
    rng = np.random.default_rng(1)
    return tuple(device.put(rng.gamma(2.0, size=(7, 3)).astype(np.float32)) for _ in range(2))


@pytest.fixture
def made(monkeypatch):
    """How often launches were found out anew."""
    found, add = [], blocks._add_dense

    def counted(*given):
        found.append(given[1])
        add(*given)

    monkeypatch.setattr(blocks, "_add_dense", counted)
    return found


POISSON = Tweedie(1.0)


def taken(device, arrays):
    return [np.array(device.take(own)) for own in arrays]


def gradient(part, factors, law=POISSON, scale=2.0):
    return taken(part.device, blocks.gradient(Pass(part, law, factors, 1e-6), scale))


def test_the_same_gradient_is_not_found_out_twice(stand_in, made):
    part, factors = part_of(stand_in), factors_of(stand_in)
    first = gradient(part, factors)
    factors[0][:] = factors[0] * np.float32(2)  # as steps move it
    second = gradient(part, factors)
    assert len(made) == 1
    np.testing.assert_equal(second, gradient(part_of(stand_in), factors))
    assert not any(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_other_factors_and_numbers_are_found_out(stand_in, made):
    part, factors = part_of(stand_in), factors_of(stand_in)
    for own, law, scale in (
        *((factors, POISSON, 2.0), (factors, POISSON, 3.0), (factors, Tweedie(2.0), 3.0)),
        (factors_of(stand_in), Tweedie(2.0), 3.0),
    ):
        wanted = gradient(part_of(stand_in), own, law, scale)
        np.testing.assert_equal(gradient(part, own, law, scale), wanted)
    assert len(made) == 8


def test_laws_whose_numbers_move_and_large_parts_are_found_out_each_time(
    stand_in, made, monkeypatch
):
    part, factors = part_of(stand_in), factors_of(stand_in)
    for alpha in (0.5, 0.7):
        gradient(part, factors, NegativeBinomial(alpha))
    monkeypatch.setattr(blocks, "SMALL_BYTES", 1)
    for _ in range(2):
        gradient(part, factors)
    assert len(made) == 4


def test_shares_follow_evenness_and_fits_the_factors(stand_in):
    part, factors = part_of(stand_in), factors_of(stand_in)
    for even in ((1.0, 1.0), ((0.5, 1.0), 1.0), ((0.5, 1.0), 1.0), (1.0, 0.25)):
        found = taken(stand_in, blocks.mean_shares(part, factors, even))
        wanted = taken(stand_in, blocks.mean_shares(part_of(stand_in), factors, even))
        np.testing.assert_equal(found, wanted)
    for by in (1, 2, 1):
        factors[1][:] = factors[1] * np.float32(by)
        found, wanted = np.zeros(2), np.zeros(2)
        blocks.evaluate(Pass(part, POISSON, factors, 1e-6), found, None)
        fresh = part_of(stand_in)
        blocks.evaluate(Pass(fresh, POISSON, factors, 1e-6), wanted, None)
        np.testing.assert_array_equal(found, wanted)
        assert found[0] < 0 < found[1]


def test_copies_wait_for_work_that_read_the_memory_they_get():
    cupy, order = fake.cupy(), []
    empty, event = cupy.empty, cupy.cuda.Event

    class Event(event):
        def record(self, stream=None):
            order.append("copies end" if stream is not None else "work so far")
            super().record(*(() if stream is None else (stream,)))

    def taken(*given):
        order.append("memory")
        return empty(*given)

    cupy.empty, cupy.cuda.Event = taken, Event
    device, values = Device(cupy), np.arange(3.0)
    (found,), done = device.begin_copies([values])
    device.wait_for_copies(done)
    assert order == ["memory", "work so far", "copies end"]
    np.testing.assert_array_equal(cupy.asnumpy(found), np.arange(3.0))
