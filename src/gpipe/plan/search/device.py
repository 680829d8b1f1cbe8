"""What a plan is made for: devices by their memory, speed and link."""

import math
from dataclasses import dataclass

GIB = 2**30
ATTAINED = 0.4
"""The share of its printed peak that a device is taken to attain in training, where a preset says no better."""


@dataclass(frozen=True)
class Device:
    """One accelerator, on paper.

    Attributes:
        memory: Bytes that it holds.
        flops: Floating-point operations that it does in a second of training, not the peak that is printed on it.
        link: Bytes a second to the devices beside it.
        name: What it is called.

    >>> Device(memory=8 * 2**30, flops=9e12).text
    '8.00 GiB, 9 TFLOP/s'
    """

    memory: float = math.inf
    flops: float = 1e12
    link: float = math.inf
    name: str = ""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}; give more than 0, in {unit}"
            for name, value, unit in (
                ("memory", self.memory, "bytes"),
                ("flops", self.flops, "floating-point operations a second"),
                ("link", self.link, "bytes a second"),
            )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
        ]
        if self.flops == math.inf:
            wrong.append("flops=inf; give a finite number")
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def text(self) -> str:
        """What it holds and does, in words."""
        memory = "any memory" if self.memory == math.inf else bytes_text(self.memory)
        link = "" if self.link == math.inf else f", link {self.link / 1e9:.3g} GB/s"
        return f"{memory}, {self.flops / 1e12:.3g} TFLOP/s{link}"


def bytes_text(number: float) -> str:
    """Bytes in words.

    >>> bytes_text(3 * 2**29), bytes_text(2**20), bytes_text(12)
    ('1.50 GiB', '1.00 MiB', '12 bytes')
    """
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:.3g} bytes"


def _preset(name: str, gibibytes: float, teraflops: float, gigabytes: float) -> Device:
    return Device(gibibytes * GIB, ATTAINED * teraflops * 1e12, gigabytes * 1e9, name)


PRESETS = {
    device.name: device
    for device in (
        _preset("tpuv2", 8, 22.5, 62.5),  # a core; bfloat16
        _preset("tpuv3", 16, 61.5, 82),  # likewise
        _preset("p100", 16, 9.3, 12),  # float32, over PCI-E, as in the paper's Table 3
        _preset("v100", 16, 125, 150),  # float16
        _preset("t4", 16, 65, 12),
        _preset("rtx3090", 24, 71, 12),
        _preset("rtx4090", 24, 165, 25),
        _preset("a100", 40, 312, 300),
        _preset("a100-80", 80, 312, 300),
        _preset("h100", 80, 989, 450),
        _preset("h200", 141, 989, 450),
    )
}
"""Devices by name: memory of one, `ATTAINED` of the peak of its matrix units, and its link one way."""


def parse_devices(text: str) -> list[Device]:
    """Reads devices as they are written: how many, and a preset, or memory x speed x link.

    >>> parse_devices("2xtpuv3") == [PRESETS["tpuv3"]] * 2
    True
    >>> parse_devices("16x9.3x12")[0].text  # GiB, TFLOP/s, GB/s
    '16.00 GiB, 9.3 TFLOP/s, link 12 GB/s'

    Raises:
        ValueError: It cannot be read; says how devices are written.
    """
    first, _, rest = text.partition("x")
    if text in PRESETS:
        return [PRESETS[text]]
    if first.isdecimal() and rest in PRESETS:
        return [PRESETS[rest]] * int(first)
    try:
        *count, memory, speed, link = map(float, text.split("x"))
        if len(count) > 1 or any(number < 1 or number % 1 for number in count):
            raise ValueError
    except ValueError:
        presets = ", ".join(PRESETS)
        raise ValueError(
            f"{text!r} is no devices; give COUNTxPRESET, as 8xtpuv3, of {presets}; or COUNTxGiBxTFLOP/sxGB/s, as "
            f"4x16x9.3x12: how many, memory, speed in training and link of each"
        ) from None
    return [Device(memory * GIB, speed * 1e12, link * 1e9)] * int(*count or [1])
