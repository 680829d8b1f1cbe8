"""Describes the devices that a plan is made for: their memory, speed and links."""

import math
import re
from dataclasses import dataclass

from gpipe.planner.search.units import format_bytes

GIB = 2**30
ATTAINED_SHARE = 0.4  # the share of its advertised peak that a device is assumed to attain in training

# GB/s that copies of pinned memory attain over PCI-E with 16 lanes: about 80 % of 15.8, 31.5 and 63 GB/s, which the
# PCI-E specifications define in each direction.
PCIE_3, PCIE_4, PCIE_5 = 12, 25, 50

FORMAT = "COUNTxGiBxTFLOP/sxGB/s, such as 4x16x9.3x12: number, memory, training speed and link of the devices"
COUNT, NUMBER = re.compile("[0-9]+"), re.compile(r"[0-9]+([.][0-9]*)?(e[+-]?[0-9]+)?|[.][0-9]+")
MOST_DEVICES = 1_000  # in one description


@dataclass(frozen=True)
class Device:
    """An accelerator that `gpipe.find_plan` plans for.

    Attributes:
        memory: Memory in bytes. Default: unlimited.
        flops: Floating-point operations per second in training, not the advertised peak. Default: 1e12.
        link: Bytes per second to the neighboring devices. Default: unlimited.
        name: Name for reports. Default: "".
        host: Bytes per second to host memory and back (from a CPU: to a file). Default: 0, nothing is offloaded.
        peak: The advertised peak of floating-point operations per second, for the MFU of `gpipe.record`. Plans ignore
            it. Default: 0, unknown.

    >>> Device(memory=8 * 2**30, flops=9e12).text
    '8.00 GiB, 9 TFLOP/s'
    """

    memory: float = math.inf
    flops: float = 1e12
    link: float = math.inf
    name: str = ""
    host: float = 0.0
    peak: float = 0.0

    def __post_init__(self) -> None:
        units = {"memory": "bytes", "flops": "floating-point operations per second", "link": "bytes per second"}
        values = {name: getattr(self, name) for name in units}
        invalid = [name for name, value in values.items() if type(value) not in (int, float) or not value > 0]
        mistakes = [
            f"{name}={values[name]!r} is not positive. Use a number > 0, in {units[name]}." for name in invalid
        ]
        rates = {"host": (self.host, "bytes"), "peak": (self.peak, "floating-point operations")}
        mistakes += [
            f"{name}={value!r} is negative or not a number. Use a number >= 0, in {unit} per second."
            for name, (value, unit) in rates.items()
            if type(value) not in (int, float) or not value >= 0
        ]
        if self.flops == math.inf:
            mistakes.append("flops=inf is not finite. Use a finite number.")
        if mistakes:
            raise ValueError("\n".join(mistakes))

    @property
    def text(self) -> str:
        """The memory, speed and link as text."""
        memory = "any memory" if self.memory == math.inf else format_bytes(self.memory)
        link = "" if self.link == math.inf else f", link {self.link / 1e9:.3g} GB/s"
        return f"{memory}, {self.flops / 1e12:.3g} TFLOP/s{link}"


PRESETS = {  # each with the memory, `ATTAINED_SHARE` of the peak of the matrix units, and the link in one direction
    name: Device(gib * GIB, ATTAINED_SHARE * teraflops * 1e12, link * 1e9, name, host * 1e9, teraflops * 1e12)
    for name, gib, teraflops, link, host in (
        ("tpuv2", 8, 22.5, 62.5, 0),  # one core, bfloat16
        ("tpuv3", 16, 61.5, 82, 0),  # one core, bfloat16
        ("p100", 16, 9.3, 12, PCIE_3),  # float32 over PCI-E, as in Table 3 of the paper
        ("v100", 16, 125, 150, PCIE_3),  # float16
        ("t4", 16, 65, 12, PCIE_3),
        ("rtx3090", 24, 71, 12, PCIE_4),
        ("rtx4090", 24, 165, 25, PCIE_4),
        ("a100", 40, 312, 300, PCIE_4),
        ("a100-80", 80, 312, 300, PCIE_4),
        ("h100", 80, 989, 450, PCIE_5),
        ("h200", 141, 989, 450, PCIE_5),
    )
}


def parse_devices(text: str) -> list[Device]:
    """Parses a description of devices: a count, and either a preset or memory x speed x link.

    Raises:
        ValueError: If the text does not describe at least one device.

    >>> parse_devices("2xtpuv3") == [PRESETS["tpuv3"]] * 2
    True
    >>> parse_devices("1x16x9.3x12")[0].text  # count, GiB, TFLOP/s, GB/s
    '16.00 GiB, 9.3 TFLOP/s, link 12 GB/s'
    """
    count, _, kind = ("1x" + text if text in PRESETS else text).partition("x")
    parts = text.split("x")
    if kind in PRESETS and COUNT.fullmatch(count):
        device = PRESETS[kind]
    elif len(parts) not in (3, 4) or not all(map(NUMBER.fullmatch, parts)):
        presets = ", ".join(PRESETS)
        raise ValueError(f"{text!r} does not describe devices. Use COUNTxPRESET or {FORMAT}. Presets: {presets}.")
    elif len(parts) == 3 and COUNT.fullmatch(count):
        raise ValueError(f"{text!r} is one device, or {count} devices without a link. Use 1x{text} or {text}xGB/s.")
    elif len(parts) == 4 and not COUNT.fullmatch(count):
        raise ValueError(f"{text!r} begins with {count}, which is not a number of devices. Use {FORMAT}.")
    else:
        memory, speed, link = map(float, parts[-3:])
        device, count = Device(memory * GIB, speed * 1e12, link * 1e9), count if len(parts) == 4 else "1"
    if not count.strip("0"):
        raise ValueError(f"{text!r} has no device. Use a count >= 1.")
    if len(count.lstrip("0")) > len(str(MOST_DEVICES)) or int(count) > MOST_DEVICES:
        raise ValueError(f"{text[:40]!r} has more than {MOST_DEVICES:,} devices. Use a smaller count.")
    return [device] * int(count)
