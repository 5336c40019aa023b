"""Parts that go together: processors of a GPU's own, memory that it shares with host, and precisions that it lacks."""

import re
from typing import Any

import pytest

from ssdplan.planner.catalogue import CPUS, GPUS, find
from ssdplan.planner.catalogue.gpus import Gpu
from ssdplan.planner.catalogue.ranks import Ranks
from ssdplan.planner.catalogue.whatif import WhatIf, estimate
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


def test_a_processor_that_is_named_stands_beside_any_gpu() -> None:
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


@pytest.mark.parametrize("cores", [0.5, 1e-9, 2.5])
def test_a_processor_has_whole_cores(cores: float) -> None:
    with pytest.raises(UsageError, match=r"--figure cpu\.cores=.*: a processor has whole cores, at least one"):
        profile(figures={"cpu.cores": cores})
    assert profile(figures={"cpu.cores": 1.0}).machine.cores == 1
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
