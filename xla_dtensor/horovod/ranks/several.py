"""Ranks that are processes, which a launcher started; a process's first device has its values."""

from __future__ import annotations

import atexit
import itertools
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor
from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest
from xla_dtensor.horovod.ranks.devices import Devices
from xla_dtensor.horovod.ranks.fusion import batches, size_of, threshold
from xla_dtensor.horovod.ranks.launches import Launches
from xla_dtensor.horovod.ranks.ranked import Ranked, RankedHandle
from xla_dtensor.horovod.ranks.service import Service, incoming, outgoing, packed, unpacked
from xla_dtensor.mesh import frame_of
from xla_dtensor.movement.device_values import from_device_values
from xla_dtensor.runtime import all_devices, processes, start

# Seconds after which a process tells the coordinator that it waits, so that a deadlock is found.
_BLOCKED = 2.0
_generations = itertools.count()


class Several(Ranked):
    """The ranks are the processes that the launcher started; this one is one of them."""

    def __init__(self) -> None:
        super().__init__(processes.index(), processes.count())
        start()
        self._generation = next(_generations)
        hosts = [processes.known(i).host for i in range(self.size)]
        own = hosts[self._rank]
        self.local_size = hosts.count(own)
        self._local_rank = hosts[: self._rank].count(own)
        names = list(dict.fromkeys(hosts))
        self.cross_size, self.cross_rank = len(names), names.index(own)
        first = {device.process_index: device for device in reversed(all_devices())}
        devices = [first[i] for i in range(self.size)]
        self._mesh = DeviceMesh("xla", list(range(len(all_devices()))), mesh_dim_names=("rank",))
        one_each = frame_of(self._mesh).one_each
        self._compiled = Devices(self._mesh) if one_each else None
        self._service = Service(self.size, self._generation) if self._rank == 0 else None
        self._launches = Launches([self._rank], devices)
        self._outbox: list[tuple[str, Any]] = []
        self._bytes = self._sent = self._read = 0
        self._closed = False
        atexit.register(self._leave, "has come to the end of its program")

    @property
    def local_rank(self) -> int:
        return self._local_rank

    # --- in a compiled step: all processes have the same program --------------------------------

    def start(self, call: HorovodRequest) -> Handle:
        if executor.trace() is not None and self._compiled is not None:
            return self._compiled.start(call)
        return super().start(call)

    def poll(self, handle: Handle) -> bool:
        return not isinstance(handle, RankedHandle) or super().poll(handle)

    def synchronize(self, handle: Handle) -> Any:
        if not isinstance(handle, RankedHandle):
            assert self._compiled is not None
            return self._compiled.synchronize(handle)
        return super().synchronize(handle)

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def on_devices(self, value: torch.Tensor) -> torch.Tensor:
        if self._compiled is None:
            return value.to("xla")
        return from_device_values([value], self._mesh)

    # --- to the others -------------------------------------------------------------------------

    def send(self, handle: RankedHandle) -> None:
        self._launches.put(self._rank, handle)
        self._outbox.append(("submit", handle.request))
        self._bytes += size_of(handle.request)
        if self._bytes >= threshold():
            self._flush()
            while self._receive(0):
                pass

    def _flush(self) -> None:
        if self._outbox:
            text = packed((self._read, self._outbox))
            self._outbox, self._bytes = [], 0
            if self._service is not None:
                self._service.take(self._rank, text)
            else:
                key = outgoing(self._generation, self._rank, self._sent)
                processes.store().put(key, text)
                self._sent += 1

    # --- from the others -----------------------------------------------------------------------

    def wait(self, handle: RankedHandle) -> None:
        self._flush()
        since = time.monotonic()
        while handle.response is None:
            if not self._receive(_BLOCKED) and time.monotonic() - since > _BLOCKED:
                since = time.monotonic()
                self._outbox.append(("block", handle.request.key))
                self._flush()

    def look(self, handle: RankedHandle) -> bool:
        self._flush()
        while handle.response is None and self._receive(0):
            pass
        return handle.response is not None

    def _receive(self, seconds: float) -> bool:
        """Launch what is next in the list of responses, if it is there in this time."""
        if self._service is not None:
            text = self._service.wait_for(self._read, seconds)
        else:
            key = incoming(self._generation, self._read)
            store = processes.store()
            text = store.wait_for(key, seconds) if seconds else store.look(key)
        if text is None:
            return False
        self._read += 1
        responses = unpacked(text)
        # Of all responses, also those of others: all processes have to make the same programs.
        for batch in batches([response for response in responses if response.is_launched]):
            if self._rank in batch[0].ranks:
                self._launches.launch(batch)
        for response in responses:
            if not response.is_launched:
                self._launches.deliver(response)
        return True

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self._leave("has called hvd.shutdown()")
        atexit.unregister(self._leave)

    def _leave(self, why: str) -> None:
        if self._closed or not processes.store().is_open():
            return
        self._closed = True
        self._outbox.append(("end", why))
        self._flush()
