"""Draws the results in `results/*.json`. Measures nothing."""

import argparse
import json
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "gpipe"  # the same picture gives the same file
mpl.rcParams["font.size"] = 8

from matplotlib import pyplot as plt  # noqa: E402  # after the choice of a backend
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from bench.report import RESULTS  # noqa: E402
from bench.runtimes import RUNTIMES  # noqa: E402

OURS, PLAIN, OTHERS = "#2a6fbb", "#8d99a6", "#d9a441"
COLORS = {
    **dict.fromkeys(("gpipe", "call", "except_last", "naive", "processes", "processes-call"), OURS),
    **dict.fromkeys(("plain", "whole"), PLAIN),
}
COMPUTING = ("transformer", "transformer-64", "conv", "amoebanet")


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__).parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    computing = [result for name in COMPUTING if name in found for result in found[name]["results"]]
    if computing:
        save("speed", speed(computing))
    if "tiny" in found:
        save("tiny", tiny(found["tiny"]["results"]))
    if "table2" in found:
        save("table2", table2(found["table2"]["cells"]))
    if "slow_link" in found:
        save("slow_link", slow_link(found["slow_link"]["found"], found["slow_link"]["rows"]))


def save(name: str, figure: Figure) -> None:
    """Writes a picture."""
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(RESULTS / f"{name}.svg")


def speed(results: list[dict[str, Any]]) -> Figure:
    """Draws the speed relative to the reference loop by runtime, with the limit of the machine, per workload."""
    figure, panels = plt.subplots(
        len(results), 1, figsize=(7, 0.5 + 1.9 * len(results)), layout="constrained", squeeze=False
    )
    for axes, result in zip(panels.flat, results, strict=True):
        plain = median(next(row for row in result["rows"] if row["name"] == "plain")["seconds"])
        rows = [row for row in result["rows"] if row["name"] in RUNTIMES and row["name"] != "plain"]
        bars(axes, rows, lambda row, plain=plain: [plain / seconds for seconds in row["seconds"]])
        axes.axvline(result["ceiling"], color="black", linewidth=0.8, linestyle="--")
        axes.axvline(1, color="black", linewidth=0.8)
        remat = "remat" if result["remat"] else "no remat"
        where = f"K={result['partitions']}, M={result['micro_batches']}"
        axes.set_title(f"{result['workload']}, {where}, {remat}", loc="left")
    panels[-1][0].set_xlabel(
        "speed over the plain loop in one thread (medians, lines from least to greatest); dashed: ceiling"
    )
    return figure


def tiny(results: list[dict[str, Any]]) -> Figure:
    """Draws the microseconds per cell by runtime, on a logarithmic scale."""
    figure, panels = plt.subplots(1, len(results), figsize=(8, 2.8), layout="constrained", squeeze=False)
    for axes, result in zip(panels.flat, results, strict=True):
        cells = result["partitions"] * result["micro_batches"]
        rows = [row for row in result["rows"] if row["name"] in RUNTIMES and row["name"] not in {"whole", "naive"}]
        bars(axes, rows, lambda row, cells=cells: [seconds / cells * 1e6 for seconds in row["seconds"]])
        axes.set_xscale("log")
        axes.set_xlim(50, 6000)
        axes.set_xticks([100, 1000], ["100", "1000"])
        axes.set_title("tiny layers, " + ("remat" if result["remat"] else "no remat"), loc="left")
        axes.set_xlabel("us for each (stage, micro-batch)")
    return figure


def bars(axes: Axes, rows: list[dict[str, Any]], values: Any) -> None:
    """Draws a bar per runtime: the median, with a line from the minimum to the maximum."""
    for at, row in enumerate(rows):
        found = values(row)
        middle = median(found)
        color = COLORS.get(row["name"], OTHERS)
        axes.barh(at, middle, color=color)
        axes.plot([min(found), max(found)], [at, at], color="black", linewidth=0.8)
        text = f"{middle:.2f}" if middle < 10 else f"{middle:.0f}"
        axes.annotate(text, (max(found), at), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [_title(row["name"]) for row in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def table2(networks: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draws the throughput over the number of partitions: measured and ideal."""
    figure, panels = plt.subplots(1, len(networks), figsize=(7, 2.8), layout="constrained", squeeze=False)
    for axes, (name, cells) in zip(panels.flat, networks.items(), strict=True):
        base, ideal = median(cells[0]["seconds"]), cells[0]["ideal"]
        for micro_batches, color in zip((1, 4, 32), (PLAIN, OTHERS, OURS), strict=True):
            own = [cell for cell in cells if cell["micro_batches"] == micro_batches]
            partitions = [cell["partitions"] for cell in own]
            axes.plot(
                partitions,
                [base / median(cell["seconds"]) for cell in own],
                "o-",
                color=color,
                label=f"M={micro_batches}",
            )
            axes.plot(partitions, [ideal / cell["ideal"] for cell in own], ":", color=color)
        axes.set_title(name, loc="left")
        axes.set_xticks([2, 4, 8])
        axes.set_xlabel("K (dotted: ideal)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("throughput, K=2 and M=1 being 1")
    panels[0][0].legend(frameon=False)
    return figure


def slow_link(wires: list[dict[str, Any]], rows: int) -> Figure:
    """Draws the rows per second over the capacity of the link, per delay."""
    delays = sorted({wire["delay"] for wire in wires})
    figure, panels = plt.subplots(1, len(delays), figsize=(7, 3), layout="constrained", squeeze=False, sharey=True)
    for axes, delay in zip(panels.flat, delays, strict=True):
        own = sorted(
            (wire for wire in wires if wire["rows"] and wire["delay"] == delay), key=lambda wire: wire["megabits"]
        )
        for name in dict.fromkeys(name for wire in own for name in ("plain", *wire["rows"])):
            there = [wire for wire in own if name in wire["rows"]]
            speeds = [[rows / seconds for seconds in wire["rows"][name]["seconds"]] for wire in there]
            middle = [median(found) for found in speeds]
            around = [[m - min(f), max(f) - m] for m, f in zip(middle, speeds, strict=True)]
            axes.errorbar(
                [wire["megabits"] for wire in there], middle, list(zip(*around, strict=True)), label=_title(name),
                color="black" if name == "ddp" else COLORS.get(name, OTHERS), marker="o", markersize=3,
                linestyle="--" if name == "torch-gpipe" else ":" if name == "plain" else "-", elinewidth=0.8,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks([wire["megabits"] for wire in own], [f"{wire['megabits']:,}" for wire in own])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(f"{delay * 1e3:g} ms each way" if delay else "no delay", loc="left")
        axes.set_xlabel("Mbit/s")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("rows a second")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _title(name: str) -> str:
    return RUNTIMES[name].title.replace("**", "").replace("`", "")


if __name__ == "__main__":
    main()
