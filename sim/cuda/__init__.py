"""A fake CUDA runtime under torch's own names: it writes records and judges nothing."""

from sim.cuda.device import FakeDevice, active_device, use_device
from sim.cuda.patch import fake_cuda
from sim.cuda.streams import Event, Stream

__all__ = ["Event", "FakeDevice", "Stream", "active_device", "fake_cuda", "use_device"]
