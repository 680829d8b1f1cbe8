"""What a plan is made for: devices by their memory, speed and link."""

import math
import re
from dataclasses import dataclass

from gpipe.planner.search.units import format_bytes

GIB = 2**30
ATTAINED_SHARE = 0.4  # of its printed peak, what a device attains in training, where a preset says no better

NUMBERS = "COUNTxGiBxTFLOP/sxGB/s, as 4x16x9.3x12: how many, memory, speed in training and link of each"
COUNT, NUMBER = re.compile("[0-9]+"), re.compile(r"[0-9]+([.][0-9]*)?(e[+-]?[0-9]+)?|[.][0-9]+")


@dataclass(frozen=True)
class Device:
    """One accelerator, on paper.

    Attributes:
        memory: Bytes that it holds.
        flops: Floating-point operations that it does in a second of training, not the peak that is printed on it.
        link: Bytes a second to the devices beside it.
        host: Bytes a second to the host's memory, or from a CPU to a file, and back; 0: nothing is offloaded.
        name: What it is called.

    >>> Device(memory=8 * 2**30, flops=9e12).text
    '8.00 GiB, 9 TFLOP/s'
    """

    memory: float = math.inf
    flops: float = 1e12
    link: float = math.inf
    name: str = ""
    host: float = 0.0

    def __post_init__(self) -> None:
        units = {"memory": "bytes", "flops": "floating-point operations a second", "link": "bytes a second"}
        given = [(name, value) for name, value in vars(self).items() if name in units]
        odd = [(name, value) for name, value in given if type(value) not in (int, float) or not value > 0]
        wrong = [f"{name}={value!r}; give more than 0, in {units[name]}" for name, value in odd]
        if type(self.host) not in (int, float) or not self.host >= 0:
            wrong.append(f"host={self.host!r}; give 0 or more, in bytes a second")
        if self.flops == math.inf:
            wrong.append("flops=inf; give a finite number")
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def text(self) -> str:
        """What it holds and does, in words."""
        memory = "any memory" if self.memory == math.inf else format_bytes(self.memory)
        link = "" if self.link == math.inf else f", link {self.link / 1e9:.3g} GB/s"
        return f"{memory}, {self.flops / 1e12:.3g} TFLOP/s{link}"


PRESETS = {  # by name: memory of one, `ATTAINED_SHARE` of the peak of its matrix units, and its link one way
    name: Device(gibibytes * GIB, ATTAINED_SHARE * teraflops * 1e12, gigabytes * 1e9, name)
    for name, gibibytes, teraflops, gigabytes in (
        ("tpuv2", 8, 22.5, 62.5),  # a core; bfloat16
        ("tpuv3", 16, 61.5, 82),  # likewise
        ("p100", 16, 9.3, 12),  # float32, over PCI-E, as in the paper's Table 3
        ("v100", 16, 125, 150),  # float16
        ("t4", 16, 65, 12),
        ("rtx3090", 24, 71, 12),
        ("rtx4090", 24, 165, 25),
        ("a100", 40, 312, 300),
        ("a100-80", 80, 312, 300),
        ("h100", 80, 989, 450),
        ("h200", 141, 989, 450),
    )
}


def parse_devices(text: str) -> list[Device]:
    """Reads devices as they are written: how many, and a preset, or memory x speed x link.

    >>> parse_devices("2xtpuv3") == [PRESETS["tpuv3"]] * 2
    True
    >>> parse_devices("1x16x9.3x12")[0].text  # how many, GiB, TFLOP/s, GB/s
    '16.00 GiB, 9.3 TFLOP/s, link 12 GB/s'
    """
    count, _, kind = ("1x" + text if text in PRESETS else text).partition("x")
    parts = text.split("x")
    if kind in PRESETS and COUNT.fullmatch(count):
        device = PRESETS[kind]
    elif len(parts) not in (3, 4) or not all(map(NUMBER.fullmatch, parts)):
        raise ValueError(f"{text!r} is no devices; give COUNTxPRESET, as 8xtpuv3: {', '.join(PRESETS)}; or {NUMBERS}")
    elif len(parts) == 3 and COUNT.fullmatch(count):
        remedy = f"write 1x{text} for the one, {text}xGB/s for the others: {NUMBERS}"
        raise ValueError(f"{text!r} is one device of {count} GiB, or {count} devices without a link; {remedy}")
    elif len(parts) == 4 and not COUNT.fullmatch(count):
        raise ValueError(f"{text!r} begins with {count}, which is no number of devices; give {NUMBERS}")
    else:
        memory, speed, link = map(float, parts[-3:])
        device, count = Device(memory * GIB, speed * 1e12, link * 1e9), count if len(parts) == 4 else "1"
    if not int(count):
        raise ValueError(f"{text!r} is no device at all; give a count of at least 1")
    return [device] * int(count)
