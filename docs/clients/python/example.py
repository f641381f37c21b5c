"""Prints the hits of a probe, in a guest that runs or in one that is booted for it.

Ctrl-C takes the probe out, too. If this is killed, the probe stays: one that is to go with its client is
planted in a session (`Sessions.Hold`).
"""

import argparse
import signal
import threading
from pathlib import Path

from hvprobe import Client

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("server", help="unix:/run/hvprobe.sock or 127.0.0.1:PORT")
options.add_argument("--token-file", type=Path, help="for a server on a port")
which = options.add_mutually_exclusive_group(required=True)
which.add_argument("--machine", help="one that runs")
which.add_argument("--kernel", help="boot one")
options.add_argument("--initrd", default="")
options.add_argument("--probe", default="p vfs_read")
options.add_argument("--seconds", type=float, default=60)
args = options.parse_args()

token = args.token_file and args.token_file.read_text().strip()
with Client(args.server, token) as client:
    machine = args.machine or client.boot(args.kernel, initrd=args.initrd).name
    ids = client.plant(machine, args.probe)
    events = client.events(machine, *ids)
    timer = threading.Timer(args.seconds, events.close)
    timer.start()
    signal.signal(signal.SIGINT, lambda *_: events.close())
    for event in events:
        name, task = events.probes[event.probe].name, event.task
        print(f"{task.comm.decode(errors='replace')}-{task.pid} [{event.vcpu}] {name}")
    timer.cancel()
    print(f"{events.dropped} dropped")
    if not events.ended:
        client.stop(machine) if args.kernel else client.remove(machine, *ids)
    if args.kernel:
        print("the guest has ended")
