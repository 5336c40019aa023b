"""What the tools found, as text for people and as JSON. Owns words and field names, nothing else."""

import json
from collections.abc import Sequence

from ssdplan.plans.units import format_bytes

from .tools import Checked, VolumeInfo


def volumes(found: Sequence[VolumeInfo]) -> str:
    """A line a file or device."""
    if not found:
        return "no volumes there"
    return "\n".join(f"{info.path}: {format_bytes(info.capacity_bytes)}, {_what(info)}" for info in found)


def _what(info: VolumeInfo) -> str:
    superblock = info.superblock
    if superblock is None:
        return "not a volume of ssdplan"
    if superblock.blank:
        return "a blank volume"
    return (
        f"volume {superblock.volume} of {superblock.striping.volumes} of store {superblock.store.hex()[:8]}, "
        + (f"generation {superblock.generation}" if superblock.generation else "nothing durable on it yet")
        + f", made for plan {superblock.plan_sha256[:8]}"
    )


def volumes_json(found: Sequence[VolumeInfo]) -> str:
    """A list of objects; `store` is null where there is none."""
    return json.dumps([_volume(info) for info in found], indent=2)


def _volume(info: VolumeInfo) -> dict[str, object]:
    superblock = info.superblock
    fields: dict[str, object] = {
        "path": str(info.path),
        "capacity_bytes": info.capacity_bytes,
        "is_volume": superblock is not None,
        "store": None,
    }
    if superblock and not superblock.blank:
        fields |= {
            "store": superblock.store.hex(),
            "volume": superblock.volume,
            "volumes": superblock.striping.volumes,
            "generation": superblock.generation,
            "stripe_bytes": superblock.striping.stripe_bytes,
            "dealing": list(superblock.striping.dealing),
            "plan_sha256": superblock.plan_sha256,
        }
    return fields


def checked(result: Checked) -> str:
    """What was verified, then a line for each damage."""
    if result.generations:
        held = " and ".join(str(generation) for generation in result.generations)
        kind = "generation" if len(result.generations) == 1 else "generations"
        summary = f"{kind} {held}: {result.extents} extents, {format_bytes(result.nbytes)}"
    else:
        summary = "nothing durable on it yet"
    lines = [f"store {result.store[:8]} on {' '.join(map(str, result.volumes))}", summary]
    lines += [f"{'note' if damage.mendable else 'damaged'}: {damage}" for damage in result.damages]
    if not result.damaged:
        lines.append("every checksum is right")
    return "\n".join(lines)


def checked_json(result: Checked) -> str:
    """One object; `damages` lists what is not whole."""
    fields = {
        "store": result.store,
        "volumes": [str(path) for path in result.volumes],
        "generations": list(result.generations),
        "extents": result.extents,
        "bytes": result.nbytes,
        "damaged": result.damaged,
        "damages": [
            {
                "path": str(damage.path),
                "offset": damage.offset,
                "what": damage.what,
                "generation": damage.generation,
                "mendable": damage.mendable,
            }
            for damage in result.damages
        ],
    }
    return json.dumps(fields, indent=2)
