"""Training steps as CUDA graphs: the kernels of a step are recorded once for each shape of batch, and then replayed.

A step on short texts has more than a thousand small kernels, and Python launches them more slowly than a GPU computes
them. A graph launches all of them at once. It reads its batch, and adds to its gradients, always at the same addresses:

    steps = CapturedSteps(step, model.parameters(), device)
    loss = steps.run(batch)

The first batch of a shape is computed kernel by kernel, the second is captured, and all others are replayed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from radq.models.cuda_graph import GraphCache, record
from radq.numerics import reset_peak_memory

MOST_TOKENS = 20480  # of a batch; larger ones keep a GPU busy by themselves, and would need much memory twice
ROOM = 2.5  # times the most memory that steps have needed so far must be there for a capture
MOST_WAITING = 3  # steps that wait for the device before captures are given up; the first one may load something

Batch = dict[str, Tensor]


def can_capture(arguments: TrainingArguments) -> bool:
    """Whether training with these arguments can be captured: on one CUDA GPU, without loss scaling or recomputation."""
    return (
        arguments.device.type == "cuda"
        and arguments.world_size == 1
        and arguments.n_gpu == 1
        and not arguments.fp16
        and not arguments.gradient_checkpointing
        and not arguments.torch_compile
        and arguments.torch_empty_cache_steps is None
        and "lomo" not in str(arguments.optim)
    )


class CapturedStep(NamedTuple):
    replay: Callable[[], None]
    loss: Tensor  # of the last replay; the next one overwrites it


class CapturedSteps(GraphCache[CapturedStep]):
    """The training steps of a model, captured for each shape of batch.

    `step` computes the loss of a batch, adds its gradients to those of the parameters, and returns the loss without its
    graph. All that changes from step to step must be in the batch.
    """

    hindered = "training steps cannot be captured as CUDA graphs, so they run without, which is slower"
    stops_at_full_memory = False

    def __init__(self, step: Callable[[Batch], Tensor], parameters: Iterable[nn.Parameter], device: torch.device):
        super().__init__(on=True)
        self.step = step
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.device = device
        self._gradients: dict[nn.Parameter, Tensor] = {}  # where graphs add them
        self._inputs: dict[Any, PackedBatch] = {}  # of each shape
        self._waiting = 0
        self._stream: Any = None
        reset_peak_memory(str(device))  # what was computed before training, such as candidates, is no part of a step

    def run(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch in main memory to those of the parameters, and return the loss of the batch."""
        self._restore_gradients()
        shape = tuple((name, values.shape, values.dtype) for name, values in batch.items())
        if shape not in self._inputs:
            self._inputs[shape] = PackedBatch(batch, self.device)
        inputs = self._inputs[shape].fill(batch)
        if not self.on or batch["input_ids"].numel() > MOST_TOKENS:
            return self.step(inputs)
        if shape not in self._warm:
            return self._rehearse(shape, inputs)
        captured = None
        if (shape, None) in self._recorded or self._has_room():
            captured = self.find(shape, None, lambda: self._capture(inputs))
        if captured is None:
            return self.step(inputs)
        captured.replay()
        return captured.loss.clone()

    def _has_room(self) -> bool:
        """Whether memory holds a graph, which keeps what a step needs, beside a longer step that is not captured."""
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        usable = free + torch.cuda.memory_reserved(self.device)
        return ROOM * torch.cuda.max_memory_allocated(self.device) <= usable

    def _restore_gradients(self) -> None:
        """Put gradients of 0 where graphs add them, if the gradients were dropped, as the Trainer does after a step."""
        dropped = [parameter for parameter in self._gradients if parameter.grad is None]
        if dropped:
            torch._foreach_zero_([self._gradients[parameter] for parameter in dropped])  # pyright: ignore
        for parameter in dropped:
            parameter.grad = self._gradients[parameter]

    def _rehearse(self, shape: Any, inputs: Batch) -> Tensor:
        """Compute a step kernel by kernel, and keep its gradients; the next step of this shape is captured."""
        with self._own_stream(), notice_waiting() as places:
            loss = self.step(inputs)
        for parameter in self.parameters:
            if parameter.grad is not None:  # a parameter without a gradient must stay so: AdamW would decay it
                self._gradients.setdefault(parameter, parameter.grad)
        if not places:
            self._warm.add(shape)
            return loss
        self._waiting += 1
        if self._waiting == MOST_WAITING:
            self.give_up(f"it waits for the GPU in {places[0]}")
        return loss

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Compute inside the block on the stream on which graphs are captured, in the order of the current stream."""
        self._stream = self._stream or torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _capture(self, inputs: Batch) -> CapturedStep:
        """Record the kernels of a step without computing it."""
        graph, loss = record(lambda: self.step(inputs), self.pool, self._stream)
        return CapturedStep(graph.replay, loss)

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self.clear()
        if torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # the old one may believe that the capture goes on


class PackedBatch:
    """Tensors on a device, side by side in one piece of memory, so that one copy fills all of them with a batch."""

    def __init__(self, like: Batch, device: torch.device):
        self._names = sorted(like, key=lambda name: -like[name].element_size())  # each then begins at its own multiple
        sizes = [like[name].element_size() * like[name].numel() for name in self._names]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        pieces = zip(self._names, self._memory.split(sizes), strict=True)
        self._tensors = {name: piece.view(like[name].dtype).view(like[name].shape) for name, piece in pieces}

    def fill(self, batch: Batch) -> Batch:
        """Copy a batch from main memory to the device without waiting for the device; returns the tensors there."""
        host = torch.cat([batch[name].reshape(-1).view(torch.uint8) for name in self._names])
        self._memory.copy_(host.pin_memory() if self._memory.is_cuda else host, non_blocking=True)
        return self._tensors


@contextlib.contextmanager
def notice_waiting() -> Iterator[list[str]]:
    """Note the places, as file:line, where the code of the block lets Python wait for the GPU."""
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        message = str(warning.message)
        if "synchronizing CUDA operation" in message:
            places.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode" not in message:  # a remark of torch about this function
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
