"""The machine as it is, unmeasured: its memory, its cores and one directory's room; for who emulates another on it.

Owns which figures of a profile are facts of this machine and not rates.
"""

from pathlib import Path

import torch

from ssdplan.native import process
from ssdplan.plans.documents.profile import Machine, MixedBandwidth, Volume

from .processor import cores, cpu_name
from .storage import free_bytes

NO_RATE = 1.0
"""In the place of a rate, which nobody is to count on."""


def this_machine(volume: Path) -> tuple[Machine, Volume]:
    """This machine, and the directory as a volume of it."""
    memory, threads = process.host_memory(), cores()
    ends = (MixedBandwidth(read=NO_RATE, write=0.0), MixedBandwidth(read=0.0, write=NO_RATE))
    place = Volume(path=str(volume.resolve()), free_bytes=free_bytes(volume) or 0, engine="io_uring", frontier=ends)
    machine = Machine(
        name=cpu_name(),
        cores=threads,
        device="cpu",
        device_name="emulated device in DRAM",
        host_memory_bytes=memory.total,
        host_available_bytes=memory.available,
        device_memory_bytes=memory.available // 2,
        compute_shares_cpu=True,
        h2d_bandwidth=NO_RATE,
        d2h_bandwidth=NO_RATE,
        update_rate=NO_RATE,
        update_threads=threads,
        compute_threads=torch.get_num_threads(),
        volumes=(place,),
    )
    return machine, place
