"""How often the diagnosis names what was planted.

python benchmarks/diagnosis/study.py tune              tables of the tuning seeds; held-out files cannot be opened
python benchmarks/diagnosis/study.py held-out FILE     the same of the held-out seeds, written to FILE
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import faults
from recordings import Recording, forbid_held_out, recordings

from rlk_audit.diagnose import Finding, diagnose

LEAST_RUNS, LEAST_HEALTHY, LEAST_PAIRS = 40, 30, 20
"""Runs of a kind; those that few recordings allow take more runs of each."""
PER_RECORDING = {"tune": 2, "held-out": 5}
"""... and at least so many runs of a recording; there are three times as many to tune on."""
FIRST = 3
GOAL = 0.95
"""Of the runs of each kind, to be right."""


@dataclass
class Outcome:
    """Counts of one kind."""

    runs: int = 0
    right: int = 0
    placed: int = 0
    below_noise: int = 0
    others: Counter = field(default_factory=Counter)


def planted_first(kind: faults.Kind, findings: tuple[Finding, ...]) -> bool:
    return findings[0].code == kind.codes[0]


def located(kind: faults.Kind, findings: tuple[Finding, ...]) -> bool:
    return str(findings[0].evidence.get("where", "")).startswith(kind.where)


def measure(kinds: tuple[faults.Kind, ...], found: list[Recording], least: int, split: str) -> dict[str, Outcome]:
    """Diagnose every run of every kind."""
    outcomes = {}
    for kind in kinds:
        outcome = outcomes[kind.name] = Outcome()
        usable = [recording for recording in found if faults.possible(kind, recording)]
        runs = max(PER_RECORDING[split], math.ceil(least / max(len(usable), 1)))
        for recording in usable:
            for number in range(runs):
                try:
                    run = faults.make(kind, recording, number)
                except faults.BelowNoiseError:
                    outcome.below_noise += 1
                    continue
                if run is None:
                    continue
                findings = diagnose(None, faults.table(run))
                _count(outcome, kind, findings)
                if split == "tune" and not _right(kind, findings):
                    told = "; ".join(f"{f.code} {f.strength:.2f}" for f in findings)
                    print(f"  miss: {kind.name} | {recording.name} {number}, {len(run)} samples | {told}")
                    print(f"        {findings[0].summary}")
    return outcomes


def _right(kind: faults.Kind, findings: tuple[Finding, ...]) -> bool:
    if not kind.codes:
        return findings[0].code == "healthy"
    if len(kind.codes) == 2:
        return set(kind.codes) <= {finding.code for finding in findings[:FIRST]}
    return planted_first(kind, findings)


def _count(outcome: Outcome, kind: faults.Kind, findings: tuple[Finding, ...]) -> None:
    outcome.runs += 1
    if _right(kind, findings):
        outcome.right += 1
        outcome.placed += located(kind, findings)
    elif len(kind.codes) == 2:
        outcome.others["without " + ", ".join(sorted(set(kind.codes) - {f.code for f in findings[:FIRST]}))] += 1
    else:
        outcome.others[findings[0].code] += 1


def rows(outcomes: dict[str, Outcome], kinds: tuple[faults.Kind, ...]) -> list[str]:
    lines = []
    for kind in kinds:
        outcome = outcomes[kind.name]
        if not outcome.runs:
            continue
        missed = ", ".join(f"{code} {count}" for code, count in outcome.others.most_common())
        code = " + ".join(f"`{code}`" for code in kind.codes) or "`healthy`"
        if outcome.below_noise:
            missed = ", ".join(filter(None, (missed, f"{outcome.below_noise} more runs below noise, not counted")))
        placed = f"{outcome.placed} of {outcome.right}" if kind.where else ""
        rate = f"{100 * outcome.right / outcome.runs:.0f} %"
        lines.append(f"| {kind.name} | {code} | {outcome.runs} | {rate} | {missed} | {placed} |")
    return lines


def below_goal(outcomes: dict[str, Outcome]) -> str:
    """Name the kinds that are right in less than GOAL of their runs."""
    low = [f"{name} ({100 * o.right / o.runs:.0f} %)" for name, o in outcomes.items() if o.right < GOAL * o.runs]
    return ", ".join(low) or "none"


def total(outcomes: dict[str, Outcome]) -> str:
    runs, right = sum(o.runs for o in outcomes.values()), sum(o.right for o in outcomes.values())
    return f"{right} of {runs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", choices=("tune", "held-out"))
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.split == "tune":
        forbid_held_out()
    start = time.time()
    found = recordings(arguments.split.replace("-", "_"))
    single = measure(faults.SINGLE, found, LEAST_RUNS, arguments.split)
    healthy = measure(faults.HEALTHY, found, LEAST_HEALTHY, arguments.split)
    pairs = measure(faults.PAIRS, found, LEAST_PAIRS, arguments.split)
    seeds = ", ".join(f"{r.name} (vocabulary {r.vocabulary})" for r in found)
    text = TEMPLATE.read_text(encoding="utf-8").format(
        seeds=seeds,
        single="\n".join(rows(single, faults.SINGLE)),
        single_total=total(single),
        single_below=below_goal(single),
        healthy="\n".join(rows(healthy, faults.HEALTHY)),
        healthy_total=total(healthy),
        healthy_below=below_goal(healthy),
        pairs="\n".join(rows(pairs, faults.PAIRS)),
        pairs_total=total(pairs),
        pairs_below=below_goal(pairs),
    )
    if arguments.file is None:
        print(text)
    else:
        arguments.file.write_text(text, encoding="utf-8")
    print(f"{time.time() - start:.0f} s", file=sys.stderr)


TEMPLATE = Path(__file__).parent / "template.md"


if __name__ == "__main__":
    main()
