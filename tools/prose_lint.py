"""Finds words and shapes of sentences that the style guide excludes; their number in each file may only fall.

    python tools/prose_lint.py              # lists those of files that have more than the baseline, and exits with 1
    python tools/prose_lint.py --all        # lists them all
    python tools/prose_lint.py --summary    # counts for each 1,000 sentences, and words per sentence
    python tools/prose_lint.py --write      # writes the baseline, after sentences were improved

The baseline is tools/prose_baseline.json. If a sentence that the lint finds is right, write the baseline again, and
say why in the commit.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from sentences import WORD, Sentence, all_sentences, split_sentences

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "tools" / "prose_baseline.json"
LONG = 25  # words
PATTERNS = {
    "alone: write only": r"(?<!standalone )\balone\b(?!-)",
    "behind, beside: write after, next to": r"\b(behind|beside)\b",
    "anew, as ever, meanwhile": r"\b(anew|as ever|by now|meanwhile)\b",
    "told, tells: write reports": r"\b(is|are|was|were) told\b|\btells (of|that|what|how)\b",
    "give: write pass, return": (
        r"(^|[;:.,] )give \w|\bgives? (the|a|what|each|one|it|those|all)\b|\b(is|are|was) given\b"
    ),
    "what-clause: name it": r"\b(of|by|with|for|to|and|from) what\b(?! to do)|^What (?!to |is |are |does |do )",
    "that of, those of: name it": r"\b(that|those) of\b",
    "begins with Of, Over": r"^(Of|Over|Behind|Beside) \w",
    "is no: write is not a": r"\b(is|are|was|were) no\b(?! (longer|more|less|\w+er)\b)",
    "has X do": (
        r"\b([Hh]as|[Hh]ave) (\w+ ){1,3}(do|run|keep|end|give|take|be|begin|draw|show|return|compute|read|say|hold)\b"
    ),
    "go by, come of, taken for": r"\b(go|goes|went) by\b|\b(come|comes|came) of\b|\btaken? for\b|\bgoes? on\b",
    "stand, lie": r"\b(stand|stands|stood|lie|lies)\b",
    "so many, as many": r"\b(so|as) many\b",
    "to the bits": r"\bto the (same|last)? ?bits?\b|\bthe bits of\b",
    "who for whoever": r"(^|[,;:] )[Ww]ho\b",
    "more than 35 words": r"^(?:\S+\s+){35}",
    "three clauses": r"(?:[;:] .*){3}",
}
COMPILED = {name: re.compile(regex) for name, regex in PATTERNS.items()}


def violations(sentence: Sentence) -> list[str]:
    """Returns the names of the patterns that a sentence, or one sentence of a message, matches.

    Code in backquotes does not count.
    """
    parts = split_sentences(re.sub(r"`[^`]*`", "CODE", sentence.text))
    return [name for name, regex in COMPILED.items() if any(map(regex.search, parts))]


def print_summary(sentences: list[Sentence]) -> None:
    """Prints, for docs, docstrings and messages, how often each pattern occurs and how long sentences are."""
    rows: dict[str, list[float]] = {name: [] for name in PATTERNS}
    rows |= {"any of them, %": [], "words per sentence": [], f"more than {LONG} words, %": [], "sentences": []}
    sources = ("docs", "docstrings", "messages")
    for source in sources:
        chosen = [sentence for sentence in sentences if sentence.source == source]
        matched = [violations(sentence) for sentence in chosen]
        lengths = [len(WORD.findall(part)) for sentence in chosen for part in split_sentences(sentence.text)]
        for name in PATTERNS:
            rows[name].append(1000 * sum(name in names for names in matched) / len(chosen))
        rows["any of them, %"].append(100 * sum(map(bool, matched)) / len(chosen))
        rows["words per sentence"].append(sum(lengths) / len(lengths))
        rows[f"more than {LONG} words, %"].append(100 * sum(length > LONG for length in lengths) / len(lengths))
        rows["sentences"].append(len(chosen))
    print(f"{'':38}" + "".join(f"{source:>12}" for source in sources))
    for name, values in rows.items():
        print(f"{name:38}" + "".join(f"{value:12.1f}" for value in values))


def main() -> int:
    """Compares the number of matches in each file with the baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    sentences = list(all_sentences(ROOT))
    if options.summary:
        print_summary(sentences)
        return 0
    counts = Counter(f"{sentence.file}: {name}" for sentence in sentences for name in violations(sentence))
    if options.write:
        BASELINE.write_text(json.dumps(counts, indent=0, sort_keys=True) + "\n")
        return 0
    allowed = json.loads(BASELINE.read_text())
    worse = {key for key, count in counts.items() if count > allowed.get(key, 0)}
    for sentence in sentences:
        for key in (f"{sentence.file}: {name}" for name in violations(sentence)):
            if options.all or key in worse:
                print(f"{key}: {sentence.text}")
    for key in sorted(worse):
        print(f"{key}: {allowed.get(key, 0)} in the baseline, {counts[key]} now")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
