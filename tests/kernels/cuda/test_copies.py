"""Copies to a device begin when what lay there before is no longer read."""

import numpy as np

from daskfactor.kernels.cuda.device import Device
from tests.kernels.cuda import fake


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
