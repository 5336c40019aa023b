"""`ssdplan doctor`: checks whether this machine and a directory are fit, and prints how to fix each problem."""

from dataclasses import dataclass
from pathlib import Path

import click

from .parsing import options as of
from .parsing.command import Argument, Command
from .parsing.types import DIRECTORY


@dataclass(frozen=True)
class Options:
    directory: Path
    json: bool


def command() -> Command:
    return Command(
        Options,
        call,
        [
            Argument(
                ["directory"],
                type=DIRECTORY,
                default=Path(),
                metavar="DIR",
                help="a directory on the drive to use; a small file is written there, read back and removed",
            ),
            click.Option(["--json"], is_flag=True, help="print findings and facts as JSON"),
        ],
    )


def call(options: Options) -> int:
    of.settle_process()
    from ssdplan.plans.documents.state_layout import Precision
    from ssdplan.profiler.doctor.doctor import judge
    from ssdplan.profiler.doctor.facts import Gpu, Probes, gather
    from ssdplan.profiler.doctor.findings import describe

    gpus: tuple[Gpu, ...] = ()
    torch_problem = torch_cuda = ""
    products: dict[Precision, float] = {}
    probes = Probes()
    try:
        from ssdplan.executor.device.device import cuda_of_torch, visible_gpus
        from ssdplan.profiler.products import product_costs

    except (ImportError, OSError) as error:  # torch's own libraries missing are one or the other
        torch_problem = " ".join(str(error).split())
    else:
        torch_cuda = cuda_of_torch()
        gpus = probes.run("GPU", lambda: tuple(Gpu(*each) for each in visible_gpus()), ())
        if not gpus and "GPU" not in probes.failed:
            products = probes.run("precision", product_costs, {})
    report = judge(gather(options.directory, gpus, torch_problem, torch_cuda, products, probes))
    print(report.json() if options.json else describe(report), end="" if options.json else "\n")
    return report.exit_code
