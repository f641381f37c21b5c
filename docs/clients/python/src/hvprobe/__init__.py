"""A client of hvprobe: boots guests, plants probes, and reads what they see.

Messages are those of `hvprobe.v1`, whose .proto files document them. Any call may raise `Refused`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status

from hvprobe.v1 import error_pb2, events_pb2, events_pb2_grpc
from hvprobe.v1 import machines_pb2, machines_pb2_grpc, probes_pb2, probes_pb2_grpc
from hvprobe.v1.events_pb2 import Event
from hvprobe.v1.machines_pb2 import Ending, Machine
from hvprobe.v1.probes_pb2 import Probe

__all__ = ["Client", "Ending", "Event", "Events", "Machine", "Probe", "Refused"]

# A list with more pages does not end: a page has an item, and a machine has at most
# this many probes.
PAGES = 65536


class Refused(Exception):
    """The server would not, or could not, do what it was asked for."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.details())
        self.code: grpc.StatusCode = error.code()
        #: What the server says for programs: its kind, which probe is to blame, what could be meant.
        self.detail = error_pb2.ErrorDetail()
        status = rpc_status.from_call(error)
        for packed in status.details if status else ():
            packed.Unpack(self.detail)


class Events(Iterator[Event]):
    """Events of a machine, from when this was made on; they end with the machine, or by `close`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._batch: Iterator[Event] = iter(())
        #: Probes that events are of, by their ids.
        self.probes: dict[int, Probe] = {}
        #: How many events this client was too slow for.
        self.dropped = 0
        #: How the machine ended, when it has.
        self.ended: Ending | None = None
        # The first message says that the subscription is in force.
        self._receive()

    def _receive(self) -> bool:
        try:
            message: events_pb2.SubscribeResponse | None = next(self._call, None)
        except grpc.RpcError as error:
            if self._call.cancelled():
                return False
            raise Refused(error) from None
        if message is None:
            return False
        self.probes.update((probe.id, probe) for probe in message.probes)
        self.dropped += message.dropped
        if message.HasField("ended"):
            self.ended = message.ended
        self._batch = iter(message.events)
        return True

    def __next__(self) -> Event:
        while (event := next(self._batch, None)) is None:
            if not self._receive():
                raise StopIteration
        return event

    def close(self) -> None:
        """Ends the events; any thread may."""
        self._call.cancel()


class Client:
    """A connection to a server: `unix:/run/hvprobe.sock`, or `127.0.0.1:PORT` with its token."""

    def __init__(self, target: str, token: str | None = None, seconds: float = 30) -> None:
        self._channel = grpc.insecure_channel(target)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._seconds = seconds
        self._machines = machines_pb2_grpc.MachinesStub(self._channel)
        self._probes = probes_pb2_grpc.ProbesStub(self._channel)
        self._events = events_pb2_grpc.EventsStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise Refused(error) from None

    def machines(self) -> list[Machine]:
        """All machines, ended ones too."""
        machines: list[Machine] = []
        request = machines_pb2.ListMachinesRequest()
        for _ in range(PAGES):
            page = self._call(self._machines.ListMachines, request)
            machines.extend(page.machines)
            if not page.next_page_token:
                return machines
            if page.next_page_token == request.page_token:
                break
            request.page_token = page.next_page_token
        raise RuntimeError("the server's list of machines does not end")

    def boot(self, kernel: str | os.PathLike[str], **more: Any) -> Machine:
        """Boots a guest; `more` are fields of `BootRequest`. Its kernel is up some seconds later."""
        request = machines_pb2.BootRequest(kernel=str(Path(kernel).absolute()), **more)
        machine: Machine = self._call(self._machines.Boot, request)
        return machine

    def stop(self, machine: str) -> Machine:
        """Takes the probes out of a guest and ends it."""
        ended: Machine = self._call(self._machines.Stop, machines_pb2.StopRequest(machine=machine))
        return ended

    def plant(self, machine: str, *definitions: str) -> list[int]:
        """Plants probes (`p vfs_read`, `r:name vfs_write`), all or none, and returns their ids."""
        specs = [probes_pb2.ProbeSpec(definition=definition) for definition in definitions]
        request = probes_pb2.RegisterRequest(machine=machine, probes=specs)
        return list(self._call(self._probes.Register, request).ids)

    def remove(self, machine: str, *ids: int) -> None:
        """Takes probes out."""
        self._call(self._probes.Unregister, probes_pb2.UnregisterRequest(machine=machine, ids=ids))

    def events(self, machine: str, *ids: int) -> Events:
        """Events of these probes, or of all, from now on."""
        request = events_pb2.SubscribeRequest(machine=machine, probes=ids)
        return Events(self._events.Subscribe(request, metadata=self._metadata))
