"""Trains translation models of several sizes, deep and wide, and with several sizes of mini-batches."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.machine import facts
from bench.report import RESULTS, describe, table, write
from bench.runs import FREE, Outcome, Run, carry_out_all

COMMON = {**FREE, "micro_batches": 4}
MODELS: dict[str, dict[str, Any]] = {
    "T(1, 512, 4)": {"layers": 1, "ffn_dim": 512, "heads": 4},
    "T(1, 512, 4), 1900 steps": {"layers": 1, "ffn_dim": 512, "heads": 4, "steps": 1900},
    "T(3, 512, 4)": {"layers": 3, "ffn_dim": 512, "heads": 4},
    "T(3, 1024, 8), wide": {"layers": 3, "ffn_dim": 1024, "heads": 8},
    "T(6, 512, 4), deep": {"layers": 6, "ffn_dim": 512, "heads": 4},
}
BATCHES = (1024, 4096, 16384)
DEEP: dict[str, Any] = {
    "layers": 24,
    "ffn_dim": 128,
    "heads": 2,
    "model_dim": 64,
    "vocabulary": 2000,
    "tokens": 1024,
    "warm_up": 100,
    "learning_rate": 5e-3,
}
REMEDIES: dict[str, dict[str, Any]] = {
    "neither": {"scaled_init": False, "clip_logits": 0},
    "logits clipped at 20": {"scaled_init": False, "clip_logits": 20},
    "scaled-down initialization": {"scaled_init": True, "clip_logits": 0},
    "both": {"scaled_init": True, "clip_logits": 20},
}
SENTENCES = 30  # of a language, that are translated
PICTURE = RESULTS.parent.parent / "docs" / "translation.svg"
AROUND = 12  # languages that a point of a line is the mean of


def main() -> None:
    """Trains and evaluates the experiments that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m bench.translation", description=__doc__)
    parser.add_argument("study", choices=["models", "batches", "trainability"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--folder", type=Path, default=Path("out/bench/translation"))
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    {"models": models, "batches": batches, "trainability": trainability}[options.study](options)


def models(options: argparse.Namespace) -> None:
    """Trains models of several sizes for the same number of steps, and evaluates each language."""
    steps = options.steps or 900
    runs = [
        Run("translation", options.folder / f"model-{_slug(name)}", {**COMMON, "steps": steps, **size})
        for name, size in MODELS.items()
    ]
    how = ["--sentences", str(SENTENCES)]
    found = dict(zip(MODELS, carry_out_all(runs, options.at_once, how), strict=True))
    sizes = {name: _parameters(run.out) for name, run in zip(MODELS, runs, strict=True)}
    kept = {name: {**one.evaluation, "epochs": one.epochs, "seconds": one.seconds} for name, one in found.items()}
    draw({name: one.evaluation["languages"] for name, one in found.items()})
    about = facts()
    one = next(iter(found.values())).evaluation
    parts = [
        "# 96 languages to English, by one model",
        describe(about),
        f"`gpipe train translation` on the catalogues of Django, {one['train']:,} pairs, {steps} steps of 4096 "
        "subwords; "
        f"tested on {one['test']:,} pairs, {SENTENCES} of each language at most, whose English was in no "
        "language's training. Without any network, chrF is "
        f"{one['copy_chrf']:.1f} if sentences are left as they are, and {one['frequent_chrf']:.1f} if each is the "
        "English sentence most frequent in training.",
        table(
            ["", "parameters", "nll", "chrF", "BLEU", "chrF, beam 4", "BLEU, beam 4", "minutes"],
            [[name, f"{sizes[name]:,}", *_scores(outcome)] for name, outcome in found.items()],
        ),
        "The 24 languages with most, and the 24 with fewest pairs to train on, mean chrF by beam search:",
        table(["", "most", "fewest"], [[name, *_ends(outcome)] for name, outcome in found.items()]),
        "![chrF by language](../../docs/translation.svg)",
    ]
    write("translation", "\n\n".join(parts), {"facts": about, "steps": steps, "sizes": sizes, "models": kept})


def batches(options: argparse.Namespace) -> None:
    """Trains with three sizes of mini-batches for the same number of steps."""
    steps = options.steps or 200
    size = {**MODELS["T(1, 512, 4)"], "steps": steps, "warm_up": 100}
    runs = [
        Run("translation", options.folder / f"batch-{tokens}", {**COMMON, **size, "tokens": tokens})
        for tokens in BATCHES
    ]
    found = carry_out_all(runs, options.at_once, ["--beam", "1", "--sentences", str(SENTENCES)])
    about = facts()
    rows = [
        [
            f"{tokens:,}",
            f"{one.evaluation['nll']:.3f}",
            f"{one.evaluation['chrf']:.1f}",
            f"{one.evaluation['bleu']:.1f}",
        ]
        for tokens, one in zip(BATCHES, found, strict=True)
    ]
    parts = [
        "# Sizes of mini-batches, the same steps",
        describe(about),
        f"T(1, 512, 4), {steps} steps each, all else equal, greedy translations; the shape of the paper's Table "
        "5, which "
        "has 260 thousand, 1 million and 4 million (BLEU 30.92, 31.86, 32.71; loss 2.58, 2.51, 2.46). As there, "
        "as many "
        "steps of a larger mini-batch see more data: the table tells what it gives, not at which price.",
        table(["subwords", "nll", "chrF", "BLEU"], rows),
    ]
    write(
        "translation_batches",
        "\n\n".join(parts),
        {"facts": about, "tokens": BATCHES, "found": [o.evaluation for o in found]},
    )


def trainability(options: argparse.Namespace) -> None:
    """Trains a deep, narrow model with and without the methods for deep models in section 5 of the paper."""
    steps = options.steps or 150
    runs = [
        Run(
            "translation",
            options.folder / f"deep-{_slug(name)}-{seed}",
            {**COMMON, **DEEP, **how, "steps": steps, "seed": seed},
        )
        for name, how in REMEDIES.items()
        for seed in (0, 1)
    ]
    found = carry_out_all(runs, options.at_once, None)
    by_name = {name: found[2 * i : 2 * i + 2] for i, name in enumerate(REMEDIES)}
    about = facts()
    parts = [
        "# What a deep, narrow model needs",
        describe(about),
        f"T(24, 128, 2), 64 wide: 48 layers, {steps} steps of {DEEP['tokens']} subwords, Adam at "
        f"{DEEP['learning_rate']} "
        f"after {DEEP['warm_up']} steps of warming up; two seeds each. The loss of the steps' mean, of the held-out "
        "sentences' subwords in the end.",
        table(
            ["", "training loss", "held-out nll"],
            [[name, _both(some, "loss"), _both(some, "nll")] for name, some in by_name.items()],
        ),
    ]
    kept = {name: [one.epochs for one in some] for name, some in by_name.items()}
    write("translation_deep", "\n\n".join(parts), {"facts": about, "found": kept})


def _both(outcomes: Sequence[Outcome], name: str) -> str:
    return ", ".join(f"{one.epochs[-1][name]:.3f}" for one in outcomes)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def _parameters(run: Path) -> int:
    from safetensors import safe_open

    with safe_open(run / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (no dict)


def _scores(outcome: Outcome) -> list[str]:
    names = ("nll", "chrf", "bleu", "beam_chrf", "beam_bleu")
    scores = [f"{outcome.evaluation[name]:.{3 if name == 'nll' else 1}f}" for name in names]
    return [*scores, f"{outcome.seconds / 60:.0f}"]


def _ends(outcome: Outcome) -> list[str]:
    chrf = [one["beam_chrf"] for one in _by_size(outcome.evaluation["languages"]).values()]
    return [f"{mean(chrf[:24]):.1f}", f"{mean(chrf[-24:]):.1f}"]


def _by_size(languages: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """Returns the languages, those with the most training pairs first."""
    return dict(sorted(languages.items(), key=lambda item: (-item[1]["train"], item[0])))


def draw(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Draws chrF by language, sorted by the number of pairs, with a line per model: the paper's Figure 3."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gpipe"
    from matplotlib import pyplot as plt

    figure, (axes, below) = plt.subplots(
        2, 1, figsize=(8, 4.6), layout="constrained", sharex=True, height_ratios=[4, 1]
    )
    colors = ("#8d99a6", "#2a6fbb", "#d9a441", "#b2453c", "#4a8f5b")
    for (name, languages), color in zip(found.items(), colors, strict=False):
        ordered = _by_size(languages)
        chrf = [one["beam_chrf"] for one in ordered.values()]
        axes.plot(range(len(chrf)), chrf, ".", color=color, markersize=3, alpha=0.5)
        around = [mean(chrf[max(0, i - AROUND // 2) : i + AROUND // 2 + 1]) for i in range(len(chrf))]
        axes.plot(range(len(chrf)), around, color=color, label=name)
    copies = [one["copy_chrf"] for one in ordered.values()]
    axes.plot(range(len(copies)), copies, ":", color="black", linewidth=0.8, label="left as they are")
    axes.set_ylabel("chrF, beam 4")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, frameon=False, fontsize=8)
    below.bar(range(len(ordered)), [one["train"] for one in ordered.values()], color="#cccccc")
    below.set_ylabel("pairs")
    below.set_xticks(range(0, len(ordered), 4), list(ordered)[::4], rotation=90, fontsize=7)
    below.set_xlabel("languages, those with most pairs to train on first")
    figure.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
