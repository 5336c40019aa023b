"""`ssdplan doctor`: what of this machine, and of a directory, is fit for training, and what mends the rest."""

import argparse
from pathlib import Path

from . import options as of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=call)
    parser.add_argument(
        "directory",
        type=of.path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="on the drive to use; a small file is written there, read back and removed",
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")


def call(options: argparse.Namespace) -> int:
    of.settle_process()
    from ssdplan.plans.state_layout import Precision
    from ssdplan.profiler.doctor import judge
    from ssdplan.profiler.facts import Gpu, gather
    from ssdplan.profiler.findings import describe

    gpus: tuple[Gpu, ...] = ()
    torch_problem = torch_cuda = ""
    products: dict[Precision, float] = {}
    try:
        from ssdplan.executor.device import cuda_of_torch, visible_gpus
        from ssdplan.profiler.products import product_costs

    except (ImportError, OSError) as error:  # torch's own libraries missing are one or the other
        torch_problem = " ".join(str(error).split())
    else:
        torch_cuda = cuda_of_torch()
        gpus = tuple(Gpu(name, nbytes, capability) for name, nbytes, capability in visible_gpus())
        products = {} if gpus else product_costs()
    report = judge(gather(options.directory, gpus, torch_problem, torch_cuda, products))
    print(report.json() if options.json else describe(report), end="" if options.json else "\n")
    return report.exit_code
