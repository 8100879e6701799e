"""Inside vLLM's worker processes: takes a version of the weights from shared memory by name.

vLLM imports this module in each worker before the model is loaded, which registers the back end `slipstream`. A
whole version is loaded between two steps; each layer is packed again as it comes in, and the output head as well.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

BACKEND = "slipstream"
# It warns at every swap of a tied head and of tables that no file holds; what a version lacks is refused before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class Owner(WeightTransferInitInfo):
    """The process that these workers belong to; when it dies, they do. 0: they belong to none."""

    pid: int


@dataclass
class Version(WeightTransferUpdateInfo):
    """Where one version lies, as `Handover.message` says it."""

    version: int
    path: str
    nbytes: int
    tensors: list[Any]


class SharedMemoryTransfer(WeightTransferEngine[Owner, Version]):  # type: ignore[misc]
    """vLLM's weight-transfer back end over shared memory."""

    init_info_cls = Owner
    update_info_cls = Version
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Owner) -> None:
        """Begin to watch the owner."""
        if init_info.pid:
            threading.Thread(target=_end_with, args=(init_info.pid,), name="owner-watch", daemon=True).start()

    def start_weight_update(self) -> None:
        """Take every layer's parameters aside, to be filled anew; an embedding on a CPU is filled where it is.

        vLLM would read an embedding into fresh memory, pack it for products that are never made with it, and copy
        it back, which for a small model is much of a swap. Nothing decodes meanwhile, so it can be written in place.
        """
        initialize_layerwise_reload(self.model)
        for module in self.model.modules():
            if _is_plain_table(module):
                info = get_layerwise_info(module)
                _place_kernel_tensors(module, info)
                info.reset()

    def receive_weights(self, update_info: Version) -> None:
        """Load a whole version from its mapping; nothing is copied but into the layers themselves."""
        fd = os.open(update_info.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, update_info.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.model.load_weights(_tensors(mapping, update_info.tensors))

    def finish_weight_update(self) -> None:
        """Pack what is not packed yet.

        On CPUs the output head keeps a packed copy, which a head tied to the embedding never gets anew by itself:
        it would go on with the old values, and every logprob with it.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class WorkerExtension:
    """Mixed into vLLM's worker, so that this module is imported there."""

    def clear_keys_and_values(self) -> None:
        """Fill the cache with zeros: a NaN left in a block spoils whoever gets the block next, masked or not."""
        for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()


class _Spare(torch.Generator):
    """Stands in for a request's generator in a draw that is thrown away."""

    def get_offset(self) -> int:
        """There is none on CPUs."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing to turn back."""


def _sparing_generators(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Let a sequence of which only a part is computed in a step keep its generator as it is.

    vLLM samples for such a sequence too, throws the token away and turns its generator back, which it cannot do on a
    CPU: it dies of it. That is so when more tokens wait than a step may hold, as after a swap that has the keys
    and values of many sequences computed again.
    """

    @functools.wraps(sample_tokens)
    def sample(runner: Any, *args: Any, **named: Any) -> Any:
        generators, count = runner.input_batch.generators, runner.input_batch.num_reqs
        own = {}
        for index in map(int, np.nonzero(runner.discard_request_mask.np[:count])[0]):
            if (generator := generators.get(index)) is not None:
                own[index], generators[index] = generator, _Spare()
                generators[index].set_state(generator.get_state())
        try:
            return sample_tokens(runner, *args, **named)
        finally:
            generators.update(own)

    return sample


def _is_plain_table(module: torch.nn.Module) -> bool:
    """Whether it is an embedding that only looks rows up: not quantised, on a CPU, and not the output head."""
    return (
        type(module) is VocabParallelEmbedding
        and type(module.quant_method) is UnquantizedEmbeddingMethod
        and get_layerwise_info(module).kernel_tensors is not None
        and all(tensor.is_cpu for tensor in get_layerwise_info(module).kernel_tensors[0].values())
    )


def _tensors(mapping: mmap.mmap, specs: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    flat = torch.frombuffer(mapping, dtype=torch.uint8)  # read-only pages: nothing here may write
    for name, dtype, shape, offset in specs:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel() * kind.itemsize
        yield name, flat[offset : offset + count].view(kind).view(shape)


def _end_with(owner: int) -> None:
    """End this worker and the core above it once the owner is gone, however it went."""
    core = os.getppid()
    fd = os.pidfd_open(owner)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    if os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = _sparing_generators(CPUModelRunner.sample_tokens)

if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
