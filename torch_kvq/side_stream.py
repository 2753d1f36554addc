"""Work that nobody waits for yet, on a stream of low priority beside the model's own."""

import contextlib
import functools

import torch


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[0])


class SideStream:
    """One thing that is made on the side stream of a device and used on the current one; does nothing off CUDA.

    ``with side.work(tensors): ...`` runs what is inside on the side stream, after what was queued so far; ``tensors`` are all
    that is read or written there and was made outside, and stay allocated until then. ``side.wait()`` makes the current stream
    wait for it, once. After an error inside it waits at once for what was queued before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._done: torch.cuda.Event | None = None

    def __getstate__(self) -> dict:
        return {"device": self.device, "_done": None}

    @contextlib.contextmanager
    def work(self, tensors):
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = _stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield
        except BaseException:
            self._finish(stream, tensors)
            self.wait()  # or what is written next in the same place might be overtaken
            raise
        self._finish(stream, tensors)

    def _finish(self, stream: torch.cuda.Stream, tensors) -> None:
        self._done = stream.record_event()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
            self._done = None
