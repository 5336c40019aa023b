"""Starts the ranks of this machine, by torchrun's own launcher.

Owns their environment, and that all others end with the first that fails.
"""

import logging
import math
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ssdplan.plans.errors import InfeasibleError, MismatchError, UsageError, error_of

from .place import OURS

ENDING_SECONDS = 30.0
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""By which torchrun's agent is told; one of a version without it takes 30 seconds."""


def launch(ranks: int, arguments: Sequence[str], ending_seconds: float = ENDING_SECONDS) -> int:
    """Run `ssdplan` with these arguments in so many processes of this machine, on loopback. Returns 0, or raises the
    error that the first of them to fail ended with; the others are ended then. `ending_seconds`: how long ranks that
    are asked to end may take until they are killed."""
    for name in ("torch.distributed.elastic", agent.__name__):  # which has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks say what is wrong
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // ranks, 1)))
    os.environ[OURS] = str(os.getpid())
    os.environ.setdefault(_SHUTDOWN_TIMEOUT, str(math.ceil(ending_seconds)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ssdplan",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "ssdplan", *arguments)
    except SignalException:
        raise KeyboardInterrupt from None  # the ranks have said what they keep
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ending = _ending(failure.exitcode)
        told = error_of(
            failure.exitcode,
            f"rank {rank} ended with {ending}{_said(failure.exitcode)}, and the others were ended; a run with "
            "snapshots goes on with --resume",
        )
        told.said = isinstance(told, UsageError | InfeasibleError | MismatchError)  # nothing is to be added
        raise told from None
    return 0


def _said(code: int) -> str:
    return "" if code < 0 else ", for the reason said above"


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
