"""SSDs: sequential bandwidths, capacities and rated endurance. Data only.

`write` is what the data sheet says, which on consumer drives holds until a cache is full. `sustained_write` is what
remains then, and what counts here: training writes without a pause.
"""

from dataclasses import dataclass

from .figure import Figure, assumed, measured

TB = 10**12


@dataclass(frozen=True, slots=True)
class Size:
    """One capacity of a model of drive; bytes and bytes/s."""

    capacity: int
    read: Figure
    write: Figure
    sustained_write: Figure
    endurance: Figure
    """Bytes that may be written in its life, by the warranty."""


@dataclass(frozen=True, slots=True)
class Ssd:
    """One model of drive; its first size is meant when none is named."""

    name: str
    sizes: tuple[Size, ...]


_RECALLED = ", recalled: we could not look it up again"
_TLC = (
    "without its cache such a drive writes 1.5 to 1.75 GB/s (TechPowerUp's review of the Samsung 980 PRO, Guru3D's of "
    "the Solidigm P44 Pro, both measured over the whole drive); this one was not looked up"
)


def _size(
    terabytes: float,
    read: float,
    write: float,
    endurance_tb: float,
    source: str,
    sustained: Figure | None = None,
    recalled: bool = False,
) -> Size:
    """Bandwidths in GB/s. `sustained` None: the drive has no cache that fills, so it writes as its data sheet says."""
    named = source + (_RECALLED if recalled else "")
    speed = Figure(write * 1e9, "bytes/s", named, recalled)
    return Size(
        capacity=round(terabytes * TB),
        read=Figure(read * 1e9, "bytes/s", named, recalled),
        write=speed,
        sustained_write=sustained or speed,
        endurance=Figure(endurance_tb * TB, "bytes", named, recalled),
    )


_980 = "Samsung 980 PRO data sheet"
_980_SUSTAINED = measured(1.5e9, "bytes/s", "TechPowerUp, Samsung 980 Pro 1 TB review, write intensive usage")
_990 = "Samsung 990 PRO data sheet"
_SN850X = "WD_BLACK SN850X product brief"
_P44 = "Solidigm P44 Pro product brief"
_P44_SUSTAINED = measured(1.75e9, "bytes/s", "Guru3D, Solidigm P44 Pro 2 TB review, linear write performance")
_PM9A3 = "Samsung PM9A3 product brief, U.2"
_P5800X = "Intel Optane SSD P5800X product brief"
_P4510 = "Intel SSD DC P4510 product brief"
_TLC_SUSTAINED = assumed(1.5e9, "bytes/s", _TLC)

_T705 = "Crucial T705 product flyer"
_9100 = "Samsung 9100 PRO data sheet; endurance by TechPowerUp's review (techpowerup.com/review/samsung-9100-pro-2-tb)"
_9550 = "Micron 9550 product brief (14 and 10 GB/s by storagereview.com/review/micron-9550-max-review)"
_9550_MAX = "Micron 9550 MAX (storagereview.com/review/micron-9550-max-review), random writes"
_CM7 = "KIOXIA CM7-R product brief (1.92 TB by eepw.com.cn article 334981); a write of the drive a day for five years"

SSDS = (
    Ssd(
        "samsung-980-pro",
        (
            _size(2, 7.0, 5.1, 1200, _980, _980_SUSTAINED),
            _size(1, 7.0, 5.0, 600, _980, _980_SUSTAINED),
        ),
    ),
    Ssd(
        "samsung-990-pro",
        (
            _size(2, 7.45, 6.9, 1200, _990, _TLC_SUSTAINED),
            _size(1, 7.45, 6.9, 600, _990, _TLC_SUSTAINED),
            _size(4, 7.45, 6.9, 2400, _990, _TLC_SUSTAINED),
        ),
    ),
    Ssd(
        "wd-sn850x",
        (
            _size(2, 7.3, 6.6, 1200, _SN850X, _TLC_SUSTAINED),
            _size(1, 7.3, 6.3, 600, _SN850X, _TLC_SUSTAINED),
            _size(4, 7.3, 6.6, 2400, _SN850X, _TLC_SUSTAINED),
        ),
    ),
    Ssd(
        "solidigm-p44-pro",
        (
            _size(2, 7.0, 6.5, 1200, _P44, _P44_SUSTAINED, recalled=True),
            _size(1, 7.0, 6.5, 750, _P44, _P44_SUSTAINED, recalled=True),
        ),
    ),
    Ssd(
        "crucial-t705",
        (
            _size(2, 14.5, 12.7, 1200, _T705, _TLC_SUSTAINED, recalled=True),
            _size(1, 13.6, 10.2, 600, _T705, _TLC_SUSTAINED, recalled=True),
            _size(4, 14.1, 12.6, 2400, _T705, _TLC_SUSTAINED, recalled=True),
        ),
    ),
    Ssd(
        "samsung-9100-pro",
        (
            _size(2, 14.7, 13.4, 1200, _9100, _TLC_SUSTAINED, recalled=True),
            _size(1, 14.7, 13.3, 600, _9100, _TLC_SUSTAINED, recalled=True),
            _size(4, 14.8, 13.4, 2400, _9100, _TLC_SUSTAINED, recalled=True),
            _size(8, 14.8, 13.4, 4800, _9100, _TLC_SUSTAINED, recalled=True),
        ),
    ),
    Ssd(
        "micron-9550-pro",
        (
            _size(7.68, 14.0, 10.0, 14016, _9550 + "; 1 write of the drive a day for five years"),
            _size(3.84, 14.0, 10.0, 7008, _9550 + "; 1 write of the drive a day for five years"),
            _size(15.36, 14.0, 10.0, 28032, _9550 + "; 1 write of the drive a day for five years"),
        ),
    ),
    Ssd(
        "micron-9550-max",
        (
            _size(6.4, 14.0, 10.0, 35040, _9550_MAX),
            _size(3.2, 14.0, 10.0, 17520, _9550_MAX),
            _size(12.8, 14.0, 10.0, 70080, _9550_MAX),
        ),
    ),
    Ssd(
        "kioxia-cm7-r",
        (
            _size(7.68, 14.0, 6.75, 14016, _CM7, recalled=True),
            _size(3.84, 14.0, 6.75, 7008, _CM7, recalled=True),
            _size(1.92, 14.0, 3.5, 3504, _CM7),
        ),
    ),
    Ssd(
        "samsung-pm9a3",
        (
            _size(3.84, 6.8, 4.0, 7008, _PM9A3, recalled=True),
            _size(7.68, 6.7, 4.0, 14016, _PM9A3, recalled=True),
        ),
    ),
    Ssd(
        "intel-p5800x",
        (
            _size(1.6, 7.2, 6.2, 292_000, _P5800X, recalled=True),
            _size(0.8, 7.2, 6.1, 146_000, _P5800X, recalled=True),
        ),
    ),
    Ssd(
        "intel-p4510",
        (
            _size(4, 3.0, 2.9, 6300, _P4510, recalled=True),
            _size(2, 3.2, 2.0, 2610, _P4510, recalled=True),
            _size(8, 3.2, 3.0, 13_880, _P4510, recalled=True),
        ),
    ),
)
