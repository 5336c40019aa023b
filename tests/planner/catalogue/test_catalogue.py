"""The catalogue: what can be checked of its figures without the things themselves."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from ssdplan.planner import catalogue
from ssdplan.planner.catalogue import CPUS, GPUS, LINKS, MODELS, SSDS, Figure, Shape, find
from ssdplan.planner.catalogue.names import ALIASES
from ssdplan.planner.catalogue.networks import NETWORKS
from ssdplan.plans.errors import UsageError

KINDS = {"GPU": GPUS, "processor": CPUS, "link": LINKS, "SSD": SSDS, "model": MODELS}

# Tensor cores, boost clock in GHz, and fused multiply-adds that a core does a cycle with fp32 accumulation: the
# makers' whitepapers, by another way than the products that the catalogue holds.
TENSOR_CORES = {
    "rtx-3090": (328, 1.695, 64),
    "rtx-4070": (184, 2.475, 64),
    "rtx-4090": (512, 2.52, 64),
    "rtx-5090": (680, 2.407, 64),
    "rtx-a5000": (256, 1.695, 128),
    "rtx-a6000": (336, 1.80, 128),
    "a100-40gb": (432, 1.41, 256),
    "a100-80gb": (432, 1.41, 256),
    "h100-80gb": (528, 1.83, 512),
    "l40s": (568, 2.52, 128),
    "rtx-6000-ada": (568, 2.505, 128),
    "h100-pcie": (456, 1.62, 512),
    "rtx-4080": (304, 2.505, 64),
    "rtx-5080": (336, 2.617, 64),
    "rtx-pro-6000": (752, 2.6, 128),
    "a40": (336, 1.74, 128),
    "v100-32gb": (640, 1.53, 64),
    "h200": (528, 1.83, 512),
    "h200-nvl": (528, 1.83, 512),
    "gh200": (528, 1.83, 512),
    "mi300x": (1216, 2.1, 256),
    "gb10": (192, 2.52, 128),
    "radeon-8060s": (80, 2.9, 128),
}
PCIE = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}
"""Transfers a second of a lane."""
CLOCKS_UNSAID = {"b200"}
# What large matrix products in bf16 were measured at, TFLOP/s, to the unit as they are usually quoted.
MEASURED = {
    "rtx-3090": 78,
    "rtx-4070": 61,  # as another card's were
    "rtx-a5000": 94,
    "rtx-a6000": 131,
    "rtx-4090": 178,
    "rtx-5090": 254,
    "l40s": 252,
    "rtx-6000-ada": 278,
    "a100-40gb": 268,
    "a100-80gb": 268,
    "h100-pcie": 500,
    "h100-80gb": 792,
    "rtx-4080": 102,  # as another card's were
    "rtx-5080": 103,
    "rtx-pro-6000": 458,
    "a40": 122,
    "v100-32gb": 97,  # in fp16
    "h200": 790,
    "h200-nvl": 853,
    "gh200": 842,
    "b200": 1696,
    "mi300x": 758,
    "gb10": 92,
    "radeon-8060s": 36,
}


def figures(thing: object) -> Iterator[Figure]:
    """Every figure in a thing of the catalogue."""
    if isinstance(thing, Figure):
        yield thing
    elif isinstance(thing, tuple):
        for part in thing:
            yield from figures(part)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from figures(getattr(thing, field.name))


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_a_shape_has_the_parameters_that_were_published(shape: Shape) -> None:
    assert shape.parameters == pytest.approx(shape.published, rel=0.005)
    assert shape.heads % shape.kv_heads == 0 and (shape.head_width or shape.hidden % shape.heads == 0)


def test_peak_flops_are_cores_times_clock() -> None:
    assert {gpu.name for gpu in GPUS} == {*TENSOR_CORES, *CLOCKS_UNSAID}
    for gpu in GPUS:
        if gpu.name in CLOCKS_UNSAID:
            continue
        cores, gigahertz, products = TENSOR_CORES[gpu.name]
        assert gpu.peak.value == pytest.approx(2 * cores * gigahertz * 1e9 * products, rel=0.015), gpu.name


def test_products_are_what_was_measured() -> None:
    """GeForce cards exceed their data sheets, and a card of less than its power never comes near."""
    assert {gpu.name for gpu in GPUS} == set(MEASURED)
    for gpu in GPUS:
        assert gpu.products.value == pytest.approx(MEASURED[gpu.name] * 1e12, rel=0.006), gpu.name
        assert 0.57 < gpu.products.value / gpu.peak.value < 1.25, gpu.name
        assert gpu.products_fp32.value < min(gpu.products.value, 2 * gpu.peak.value), gpu.name
    above = {gpu.name for gpu in GPUS if gpu.products.value > gpu.peak.value}
    assert above == {"rtx-3090", "rtx-4070", "rtx-4080", "rtx-4090", "rtx-5090"}


def test_links_stay_below_what_the_standard_allows() -> None:
    by_standard = {f"pcie-{name}-x16": 16 * rate / 8 * 128 / 130 for name, rate in PCIE.items()}
    limits = by_standard | {"nvlink-c2c": 450e9, "unified-memory": 273e9 / 2}
    for link in LINKS:
        limit = limits[link.name]
        assert all(0.65 * limit < figure.value < limit for figure in figures(link)), link.name
    assert {gpu.link for gpu in GPUS} <= {link.name for link in LINKS}


def test_a_gpu_that_comes_with_a_processor_names_it() -> None:
    own = {gpu.name: find("processor", gpu.cpu, CPUS) for gpu in GPUS if gpu.cpu}
    for gpu in GPUS:
        if gpu.unified:
            assert own[gpu.name].memory_bandwidth.value == gpu.memory_bandwidth.value, "it is one memory"


def test_drives_stay_below_their_link_and_last_as_warranted() -> None:
    for ssd in SSDS:
        for size in ssd.sizes:
            assert max(size.read.value, size.write.value) < 4 * PCIE["5.0"] / 8 * 128 / 130, "four lanes"
            assert size.sustained_write.value <= size.write.value
            assert 0.25 < size.endurance.value / size.capacity / (5 * 365) <= 100.01, "writes of the drive a day"


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_has_a_source(kind: str) -> None:
    for thing in KINDS[kind]:
        for figure in figures(thing):
            assert figure.value > 0 and figure.unit
            assert len(figure.source) >= 12, f"{thing.name}: {figure}"
    for shape in MODELS:
        assert shape.source


@pytest.mark.parametrize("kind", KINDS)
def test_things_are_found_by_name_in_any_case(kind: str) -> None:
    things = KINDS[kind]
    assert len({thing.name for thing in things}) == len(things)
    for thing in things:
        assert thing.name == thing.name.lower()
        assert find(kind, thing.name.upper(), things) is thing


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no GPU 'rtx-4091'.*did you mean rtx-4090\?.*known: a100-40gb, .*rtx-a6000"):
        find("GPU", "rtx-4091", GPUS)
    with pytest.raises(UsageError, match=r"no SSD 'zzz' in the catalogue \(known: "):
        find("SSD", "zzz", SSDS)
    with pytest.raises(UsageError, match=r"did you mean llama-3.1-405b or llama-3.1-70b or llama-3.1-8b or llama-3.2"):
        find("model", "llama 3", KINDS["model"])


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("GPU", "RTX 4090", "rtx-4090"),
        ("GPU", "rtx4090", "rtx-4090"),
        ("GPU", "4090", "rtx-4090"),
        ("GPU", "NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("GPU", "RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("GPU", "NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("GPU", "NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("GPU", "a6000", "rtx-a6000"),
        ("SSD", "990-pro", "samsung-990-pro"),
        ("SSD", "WD_BLACK SN850X", "wd-sn850x"),
        ("SSD", "Intel Optane P5800X", "intel-p5800x"),
        ("SSD", "Samsung 990 Pro with heatsink", "samsung-990-pro"),
        ("processor", "AMD Ryzen 9 7950X", "ryzen-9-7950x"),
        ("processor", "Intel Xeon Platinum 8462Y+", "xeon-8462y"),
        ("link", "PCIe 4.0", "pcie-4.0-x16"),
        ("model", "Llama 3.1 8B", "llama-3.1-8b"),
        ("model", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("model", "google/gemma-3-27b-it", "gemma-3-27b"),
        ("model", "mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("model", "gpt-2", "gpt2"),
        ("model", "GPT-2 0.8B", "gpt2-large"),
        ("model", "phi 4", "phi-4"),
    ],
)
def test_names_are_taken_as_people_write_them(kind: str, name: str, meant: str) -> None:
    assert find(kind, name, KINDS[kind]).name == meant


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("GPU", "h100", "GPU 'h100': could be h100-80gb or h100-pcie; name one of them"),
        ("GPU", "A100", "could be a100-40gb or a100-80gb"),
        ("link", "pcie", "could be pcie-3.0-x16, pcie-4.0-x16 or pcie-5.0-x16"),
        ("model", "llama 70b", "could be llama-3.1-70b or llama-3.3-70b"),
    ],
)
def test_a_name_of_several_things_lists_them(kind: str, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(kind, name, KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("GPU", "l40"),  # another card than the l40s
        ("GPU", "RTX 4070 Ti"),
        ("GPU", "RTX 4090 Laptop GPU"),
        ("GPU", "A100 80GB PCIe"),
        ("GPU", "100"),
        ("GPU", "GeForce"),
        ("GPU", ""),
        ("GPU", "-" * 10_000),
        ("model", "a-" * 100_000),
        ("model", "Mistral-7B-v0.1"),  # fewer tokens than v0.3
        ("model", "Mixtral-8x22B"),
        ("model", "Llama-3.1-8"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_something_else_is_no_other_name(kind: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"no {kind} "):
        find(kind, name, KINDS[kind])


def test_other_names_are_of_things_that_there_are() -> None:
    own = {thing.name for things in KINDS.values() for thing in things}
    assert set(ALIASES.values()) <= own and not own & set(ALIASES)


def test_what_the_face_names_exists() -> None:
    assert all(hasattr(catalogue, name) for name in catalogue.__all__)


def rows() -> dict[str, list[tuple[str, ...]]]:
    """The tables of docs/catalogue.md that list what there is, without their heads."""

    def giga(value: float) -> str:
        return f"{value / 1e9:g} GB/s"

    def worst(ssd: catalogue.Ssd, name: str) -> float:
        return min(getattr(size, name).value for size in ssd.sizes)

    return {
        "GPU": [
            (
                f"`{gpu.name}`",
                f"{gpu.memory.value / (1 << 30):g} GiB",
                f"{gpu.peak.value / 1e12:g} TFLOP/s",
                f"{gpu.products.value / 1e12:g} TFLOP/s{' (assumed)' if gpu.products.assumed else ''}",
                giga(gpu.memory_bandwidth.value),
                f"{gpu.attention.value:g}{' (assumed)' if gpu.attention.assumed else ''}",
                f"`{gpu.link}`",
            )
            for gpu in GPUS
        ],
        "SSD": [
            (
                f"`{ssd.name}`",
                ", ".join(f"{size.capacity / catalogue.TB:g} TB" for size in ssd.sizes),
                giga(worst(ssd, "read")),
                giga(worst(ssd, "write")),
                giga(worst(ssd, "sustained_write")),
            )
            for ssd in SSDS
        ],
        "CPU": [(f"`{cpu.name}`", f"{cpu.cores.value:g}", giga(cpu.memory_bandwidth.value)) for cpu in CPUS],
        "MODEL": [
            (
                f"`{shape.name}`",
                f"{shape.parameters:,}",
                f"{shape.active_parameters:,}" if shape.experts else "all",
                f"{shape.hidden:,}",
                str(shape.blocks),
            )
            for shape in MODELS
        ],
    }


def test_the_document_lists_what_there_is() -> None:
    text = (Path(__file__).parents[3] / "docs" / "catalogue.md").read_text(encoding="utf-8")
    for table in rows().values():
        assert "\n".join("| " + " | ".join(row) + " |" for row in table) in text
    for link in LINKS:
        assert f"`{link.name}`" in text
    for network in NETWORKS:
        joined = f"GPUs: {', '.join(f'`{name}`' for name in network.gpus)}" if network.gpus else network.between
        assert f"| `{network.name}` | {joined} | {network.bandwidth.value / 1e9:.3g} GB/s |" in text
