"""Parts that go together: processors of a GPU's own, memory that it shares with host, and precisions that it lacks."""

import re
from typing import Any

import pytest

from ssdplan.planner.catalogue import CPUS, GPUS, LINKS, find
from ssdplan.planner.catalogue.gpus import Gpu
from ssdplan.planner.catalogue.parts import Lanes, behind_chipset, gpu_of
from ssdplan.planner.catalogue.ranks import Ranks
from ssdplan.planner.catalogue.whatif import SIZES, WhatIf, estimate, figures_of, parse_figure
from ssdplan.planner.predict.drive import combined_frontier
from ssdplan.planner.request import SolveRequest, budget_of
from ssdplan.plans.documents.profile import Profile
from ssdplan.plans.errors import UsageError

GIB = 1 << 30


def profile(**fields: Any) -> Profile:
    return estimate(
        WhatIf(
            **{"model": "smollm2-135m", "gpu": "rtx-4090", "ssds": ["990 pro"], "host_memory_bytes": 48 * GIB} | fields
        )
    )


@pytest.mark.parametrize("named", [{"gpu": ""}, {"cpu": ""}, {"link": ""}, {"gpu": "none", "cpu": ""}, {"ssds": [""]}])
def test_a_name_without_a_letter_names_nothing(named: dict[str, Any]) -> None:
    """As a variable that is not set leaves it: it does not mean what no name means."""
    with pytest.raises(UsageError, match=r"no .* '' in the catalogue"):
        profile(**named)
    with pytest.raises(UsageError, match="--link : without a GPU there is no link"):
        profile(gpu="none", link="")


@pytest.mark.parametrize("gpu", ["gb10", "Strix Halo"])
def test_a_gpu_that_shares_memory_has_what_host_leaves(gpu: str) -> None:
    card = find("GPU", gpu, GPUS)
    machine = profile(gpu=gpu).machine
    assert machine.device_memory_bytes == pytest.approx(card.memory.value - 48 * GIB - GIB, abs=1)
    assert (machine.device_name, machine.name) == (card.name, f"{card.name}, {card.cpu}")
    assert machine.cores == find("processor", card.cpu, CPUS).cores.value
    with pytest.raises(UsageError, match=r"--host-memory 1[12]\d.* GiB: .* nothing is left for it"):
        profile(gpu=gpu, host_memory_bytes=int(card.memory.value) - GIB // 2)
    with pytest.raises(UsageError, match="one to a machine; name machines with --nodes"):
        profile(gpu=gpu, several=Ranks(2, 1))


def test_a_processor_that_is_named_stands_beside_a_gpu() -> None:
    assert profile(gpu="gh200").machine.name == "gh200, grace"
    assert profile(gpu="gh200", cpu="EPYC 9965").machine.name == "gh200, epyc-9965"
    assert profile(gpu="none").machine.name == "ryzen-7-7840u"
    assert profile(gpu="RTX 4090").machine.name == "rtx-4090, ryzen-9-7950x"


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.unified], ids=lambda gpu: gpu.name)
def test_a_chip_with_unified_memory_has_its_own_processor_and_no_link(gpu: Gpu) -> None:
    for cpu in CPUS:
        if cpu.name != gpu.cpu:
            with pytest.raises(UsageError, match=f"--cpu {cpu.name}: {gpu.name} is of one chip with {gpu.cpu}"):
                profile(gpu=gpu.name, cpu=cpu.name)
    with pytest.raises(UsageError, match="shares its memory with host, so there is no link; leave it out"):
        profile(gpu=gpu.name, link="pcie-5.0-x16")
    assert profile(gpu=gpu.name, cpu=gpu.cpu, link=gpu.link) == profile(gpu=gpu.name)


@pytest.mark.parametrize("chip", [gpu for gpu in GPUS if gpu.unified], ids=lambda gpu: gpu.name)
def test_a_processor_of_a_chip_stands_beside_no_other_gpu(chip: Gpu) -> None:
    for gpu in GPUS:
        if not gpu.unified:
            words = f"--cpu {chip.cpu}: it is of one chip with {chip.name}, a GPU, not beside {gpu.name}; name another"
            with pytest.raises(UsageError, match=words):
                profile(gpu=gpu.name, cpu=chip.cpu, precision="fp16")
    assert profile(gpu="none", cpu=chip.cpu).machine.name == chip.cpu, "alone it computes without its GPU"


def test_a_link_within_a_chip_is_of_that_chip_alone() -> None:
    within = {link.name for link in LINKS if link.within}
    assert within == {"nvlink-c2c", "unified-memory"}
    for gpu in GPUS:
        for link in within - {gpu.link} if not gpu.unified else ():
            words = (
                rf"--link {link}: it is within .*, and {gpu.name} has none such; leave it out \(its own is {gpu.link}\)"
            )
            with pytest.raises(UsageError, match=words):
                profile(gpu=gpu.name, link=link, precision="fp16")
    assert profile(gpu="gh200", link="nvlink-c2c") == profile(gpu="gh200")
    assert profile(gpu="rtx-4090", link="pcie-3.0-x16").machine.h2d_bandwidth == 12e9, "a slower slot"


@pytest.mark.parametrize(
    "named", [{}, {"gpu": "none"}, {"muon": True}, {"gpu": "a100-80gb", "several": Ranks(4, 2), "networks": ["10gbe"]}]
)
@pytest.mark.parametrize("value", ["1e-300", "1.1e-30", "1e15", "1e17", "9e29", "1e300"])
def test_a_figure_of_any_size_makes_an_estimate_or_is_refused(named: dict[str, Any], value: str) -> None:
    """And no figure is so far out that seconds would not be finite."""
    what_if = WhatIf("smollm2-135m", **{"gpu": "rtx-4090", "ssds": ["990 pro"], "host_memory_bytes": 48 * GIB} | named)
    names = [name.partition(" of ")[0] for name in figures_of(what_if)] + ["cpu.drives", "cpu.chipset"]
    taken = []
    for name in names:
        try:
            given = dict([parse_figure(f"{name}={value}B" if name.endswith(SIZES) else f"{name}={value}")])
            profile(**named, figures=given)
        except UsageError as error:
            assert name in str(error) and "\n" not in str(error)
        else:
            taken.append(name)
    assert bool(taken) == (value not in ("1e-300", "1e300"))


@pytest.mark.parametrize("cores", [0.5, 1e-9, 2.5, 1e15])
def test_a_processor_has_whole_cores(cores: float) -> None:
    with pytest.raises(UsageError, match=r"--figure cpu\.cores=.*: a processor has whole cores, 1 to 1,048,576"):
        profile(figures={"cpu.cores": cores})
    assert profile(figures={"cpu.cores": 1.0}).machine.cores == 1
    if cores % 1:
        with pytest.raises(UsageError, match=r"--figure cpu\.drives=.*: drives are counted whole"):
            profile(figures={"cpu.drives": cores})


@pytest.mark.parametrize("ssd", ["990 pro:", "990 pro: *2", "samsung-990-pro:*2"])
def test_a_colon_wants_a_capacity_behind_it(ssd: str) -> None:
    with pytest.raises(UsageError, match="after : comes a capacity, such as samsung-990-pro:2TB"):
        profile(ssds=[ssd])


@pytest.mark.parametrize("ssd", ["Samsung 990 Pro 4TB", "samsung 990 pro 4 TB", "990-pro:4tb", "990 PRO 4TB*1"])
def test_a_capacity_may_follow_a_drive_s_name(ssd: str) -> None:
    assert profile(ssds=[ssd]) == profile(ssds=["samsung-990-pro:4TB"])
    with pytest.raises(UsageError, match="samsung-990-pro comes with"):
        profile(ssds=["Samsung 990 Pro 3TB"])


@pytest.mark.parametrize(
    "ssd", ["2x 990 pro", "2 x Samsung 990 PRO 2TB", "990 pro * 2", "990 pro:2TB *2", "Samsung 990 Pro 2TB* 2"]
)
def test_a_number_of_drives_is_taken_as_people_write_it(ssd: str) -> None:
    assert profile(ssds=[ssd]) == profile(ssds=["samsung-990-pro*2"])


@pytest.mark.parametrize(
    ("name", "own"),
    [("RTX 4090 24GB", "rtx-4090"), ("A100 40 GB", "a100-40gb"), ("GeForce RTX 3090 24 GiB", "rtx-3090")],
)
def test_a_card_s_memory_may_follow_its_name(name: str, own: str) -> None:
    assert gpu_of(name).name == own
    with pytest.raises(UsageError, match="--gpu RTX 4090 48GB: rtx-4090 has 24 GiB"):
        gpu_of("RTX 4090 48GB")
    with pytest.raises(UsageError, match=r"no GPU .*'RTX 4091'"):
        gpu_of("RTX 4091 24GB")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("AMD Ryzen 9 7950X 16-Core Processor", "ryzen-9-7950x"),
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763"),
        ("AMD Ryzen 9 7950X 16-core", "ryzen-9-7950x"),
    ],
)
def test_a_processor_has_the_name_that_linux_has_for_it(name: str, own: str) -> None:
    assert find("processor", name, CPUS).name == own


MIXED = ["samsung-9100-pro", "micron-9550-pro", "samsung-990-pro", "intel-p4510", "kioxia-cm7-r", "samsung-9100-pro"]


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("direct", [1, 2, 4])
def test_no_drive_and_no_link_moves_more_than_it_can(count: int, direct: int) -> None:
    """And of drives that differ, a link is full where what they ask for is more."""
    free = profile(cpu="epyc-9654", ssds=MIXED[:count]).machine.volumes
    most = [[volume.frontier[0].read for volume in free], [volume.frontier[1].write for volume in free]]
    for rates, own in zip(behind_chipset(most[0], most[1], Lanes(direct, 7.4e9)), most, strict=True):
        assert all(rate <= limit for rate, limit in zip(rates, own, strict=True))
        behind = _behind(most, direct)
        asked = sum(own[number] for number in behind)
        assert sum(rates[number] for number in behind) == pytest.approx(min(asked, 7.4e9))
        assert all(rates[number] == own[number] for number in range(count) if number not in behind)


def _behind(most: list[list[float]], direct: int) -> list[int]:
    """Those that move least of an even mix of reads and writes."""
    even = [1 / (1 / read + 1 / write) for read, write in zip(*most, strict=True)]
    return sorted(range(len(even)), key=lambda number: -even[number])[direct:]


def test_the_drives_that_take_most_stripes_have_lanes_of_their_own() -> None:
    """A 9100 PRO reads faster than a 9550 PRO, and writes 1.5 GB/s for 10: behind the chipset it loses little."""
    machine = profile(ssds=["samsung-9100-pro*2", "micron-9550-pro"]).machine
    assert [volume.frontier[0].read for volume in machine.volumes] == [14.7e9, pytest.approx(7.4e9), 14e9]
    assert [volume.frontier[1].write for volume in machine.volumes] == [1.5e9, 1.5e9, 10e9]


def test_drives_that_differ_share_the_link_by_their_stripes() -> None:
    """So their reads and writes fill it both ways; by what each reads alone they were held up at 3.9 GB/s."""
    machine = profile(ssds=["samsung-9100-pro", "micron-9550-pro"], figures={"cpu.drives": 1}).machine
    reads, writes = behind_chipset([14.7e9, 14e9], [1.5e9, 10e9], Lanes(0, 7.4e9))
    assert sum(reads) == pytest.approx(7.4e9) and sum(writes) == pytest.approx(7.4e9)
    volumes = [
        volume.model_copy(
            update={
                "frontier": tuple(
                    point.model_copy(update={"read": read if point.read else 0.0, "write": write if point.write else 0})
                    for point in volume.frontier
                )
            }
        )
        for volume, read, write in zip(machine.volumes, reads, writes, strict=True)
    ]
    ends = combined_frontier(volumes)
    assert ends[0][0] > 0.95 * 7.4e9 and ends[-1][1] > 0.95 * 7.4e9


@pytest.mark.parametrize(
    ("ssds", "told"),
    [
        (
            ["micron-9550-pro*8"],
            "8 read and write 9.87 GB/s each at once, and the fastest 3 of them alone 15.2: a store",
        ),
        (["micron-9550-pro", "intel-p4510:2TB"], ""),
        (["micron-9550-pro*4"], ""),
        (["990 pro"], ""),
    ],
)
def test_that_drives_are_slower_together_is_told(ssds: list[str], told: str) -> None:
    """A store has at least a stripe in 16 on each."""
    found = [note for note in profile(ssds=ssds).notes if note.startswith("drives: ")]
    assert len(found) == bool(told)
    assert all(told in note for note in found)


def test_a_gpu_without_bf16_wants_another_precision() -> None:
    with pytest.raises(UsageError, match="v100-32gb: it has no fast products in bf16; take --precision fp16"):
        profile(gpu="V100")
    assert profile(gpu="V100", precision="fp16").machine.device_name == "v100-32gb"


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_no_budget_is_more_than_the_card_has(gpu: str) -> None:
    machine = profile(gpu=gpu, precision="fp16").machine
    most = machine.device_memory_bytes
    assert most <= find("GPU", gpu, GPUS).memory.value - GIB
    assert budget_of(machine, SolveRequest(host_memory_bytes=GIB, device_memory_bytes=most)).device == most
    with pytest.raises(UsageError, match=f"device memory of .*: {re.escape(gpu)} has .* for a plan; ask for less"):
        budget_of(machine, SolveRequest(host_memory_bytes=GIB, device_memory_bytes=most + GIB))
