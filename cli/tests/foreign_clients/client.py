"""Calls a server as Python's gRPC does, with nothing of hvprobe but what the server tells of itself.

Usage: client.py TARGET [TOKEN_FILE [KERNEL INITRD]]. Prints what it found, a line each; ends with status 0 if all
was as expected. With a kernel it boots a guest, has its hits told and decided, and stops it.
"""

import queue
import sys
import threading

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection

SECONDS = 60
RUNNING = 2
MACHINES = "hvprobe.v1.Machines"
PROBES = "hvprobe.v1.Probes"
CALLS = "while :; do workload calls getpgid 3; done"


class Shown(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor,
            grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Shows the token with each call, as credentials go over TLS only."""

    def __init__(self, token):
        self.metadata = [("authorization", f"Bearer {token}")]

    def intercept_unary_unary(self, call, details, request):
        return call(details._replace(metadata=self.metadata), request)

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = intercept_unary_unary


def hits(method, kernel, initrd):
    """Boots a guest, has its hits told, and decided, and stops it."""
    name = "python"
    command = ["sh", "-c", CALLS]
    method(MACHINES, "Boot")(name=name, kernel=kernel, initrd=initrd, command=command)
    seen = method(MACHINES, "Watch")(machine=name)
    print("running:", any(machine.state == RUNNING for machine in seen))
    seen.cancel()

    plant = method(PROBES, "Register")
    ids = plant(machine=name, probes=[{"definition": "p:plain __x64_sys_getpgid"}]).ids
    stream = method("hvprobe.v1.Events", "Subscribe")(machine=name, probes=ids)
    names, count = {}, 0
    for message in stream:
        names.update((probe.id, probe.name) for probe in message.probes)
        assert all(names[event.probe] == "plain" for event in message.events)
        assert all(event.task.comm == b"workload" for event in message.events)
        count += len(message.events)
        if count >= 3:
            break
    stream.cancel()
    print("hits: 3")
    method(PROBES, "Unregister")(machine=name, ids=ids)

    asks = {"ask": {"deadline_ms": 60000}}
    ids = plant(machine=name, probes=[{"definition": "p:asked __x64_sys_getpgid", "actions": asks}]).ids
    decide = method("hvprobe.v1.Decisions", "Decide")
    answers = queue.SimpleQueue()
    answers.put(decide.request(decide_for={"machine": name, "probes": ids}))
    asked = decide.call(iter(answers.get, None), timeout=SECONDS)
    decided = 0
    for message in asked:
        if not message.HasField("question"):
            continue
        if decided == 2:
            break
        question = message.question
        answers.put(decide.request(answer={"token": question.token, "decision": {"return_value": 1}}))
        decided += 1
    answers.put(None)
    asked.cancel()
    print("decided:", decided)
    method(PROBES, "Unregister")(machine=name, ids=ids)
    print("stopped:", method(MACHINES, "Stop")(machine=name).ending.reason)


def main(target, *rest):
    with grpc.insecure_channel(target) as channel:
        talk(channel, *rest)
    # A thread of gRPC's that is still about the end of a call when Python ends is stopped where it is, which may be
    # with a lock that Python's end then waits for.
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(SECONDS)


def talk(channel, token_file=None, *guest):
    if token_file is not None:
        with open(token_file, encoding="ascii") as token:
            channel = grpc.intercept_channel(channel, Shown(token.read().strip()))
    database = reflection.ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert "hvprobe.v1.Machines" in services, services
    pool = descriptor_pool.DescriptorPool(database)

    def method(service, name):
        found = pool.FindServiceByName(service).methods_by_name[name]
        make = message_factory.GetMessageClass
        request, response = make(found.input_type), make(found.output_type)
        many = found.client_streaming
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        kind = kinds[many, found.server_streaming]
        call = kind(
            f"/{service}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

        def ask(**fields):
            first = request(**fields)
            return call(iter([first]) if many else first, timeout=SECONDS)

        ask.call, ask.request = call, request
        return ask

    if guest:
        return hits(method, *guest)

    def refused(call):
        try:
            answer = call()
            list(answer) if hasattr(answer, "__iter__") else None
        except grpc.RpcError as error:
            details = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
            return f"{error.code().name} {b'hvprobe.v1.ErrorDetail' in details}"
        return "it was taken"

    machines = MACHINES
    # On one connection, so that later calls refer to what the first one sent.
    for _ in range(3):
        print("machines:", len(method(machines, "ListMachines")().machines))
    print("health:", method("grpc.health.v1.Health", "Check")(service=machines).status)
    print("boot:", refused(lambda: method(machines, "Boot")(name="a", kernel="/nowhere")))
    print("get:", refused(lambda: method(machines, "GetMachine")(machine="a")))
    print("symbols:", refused(lambda: method("hvprobe.v1.Symbols", "ListSymbols")(machine="a")))
    lines = method("hvprobe.v1.Sources", "ListLines")
    print("lines:", refused(lambda: lines(machine="a", function="vfs_read")))
    upload = method("hvprobe.v1.Sources", "UploadDebugInfo")
    print("upload:", refused(lambda: upload(machine="a", data=b"ELF")))
    print("events:", refused(lambda: method("hvprobe.v1.Events", "Subscribe")(machine="a")))
    aggregate = method("hvprobe.v1.Histograms", "Aggregate")
    wanted = {"machine": "a", "probes": [1], "histogram": "keys=comm"}
    print("histograms:", refused(lambda: aggregate(aggregate_for=wanted)))


main(*sys.argv[1:])
