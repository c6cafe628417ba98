"""Change the core on purpose, one place at a time, and see whether the tests notice.

    python tools/mutation.py [--sample 400 | --all] [--seed 0] [--again] [--write mutants/mutation.md]

mutmut makes the mutants, and runs for each the tests that reach its function, in this process's environment. What
those do not notice is tried on two real ranks under torchrun. A mutant is counted as killed when a test fails or never
ends. Results are kept in ``mutants/``: a run that was stopped goes on where it was.

Ends with 1 if less than nine of ten mutants were killed, or if a survivor has no reason in tools/survivors.yaml.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "mutants"
ON_RANKS = MUTANTS / "on_ranks.json"
REASONS = ROOT / "tools" / "survivors.yaml"
LEAST = 0.9
RANKS = 2
RANKS_TIMEOUT = 240
NORMAL_95 = 1.96
KILLED = {1, 3, 24, -24, 36, 152, 255}
"""Exit statuses that mutmut keeps of a failed test, an internal error of pytest and a test without end."""
SURVIVED, NO_TESTS = {0}, {5, 33}


class Share(NamedTuple):
    """A share and its 95 % interval (E. B. Wilson, "Probable Inference", J. Am. Stat. Assoc. 22, 1927)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Reason:
    """Why a survivor is no gap in the tests; it holds for this change alone."""

    change: str
    why: str


def share(killed: int, of: int) -> Share:
    p, spread = killed / of, NORMAL_95**2 / of
    middle = (p + spread / 2) / (1 + spread)
    half = math.sqrt(p * (1 - p) * spread + spread**2 / 4) / (1 + spread)
    return Share(p, middle - half, middle + half)


def sample(names: Iterable[str], count: int, seed: int) -> list[str]:
    """Return names in an order that a change elsewhere leaves alone."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:count]


def results() -> dict[str, int | None]:
    """Return mutant -> the exit status of its tests, None where they have not been run."""
    found: dict[str, int | None] = {}
    for path in sorted(MUTANTS.glob("rlk_audit/**/*.meta")):
        found |= json.loads(path.read_text())["exit_code_by_key"]
    return found


def mutmut(*names: str, children: int) -> None:
    # A name of nothing makes the mutants and the table of which test reaches what, and mutmut then ends with an error.
    subprocess.run([Path(sys.executable).with_name("mutmut"), "run", "--max-children", str(children), *names], cwd=ROOT)


def change(name: str) -> str:
    """Return the lines of a mutant's function that differ from the original, as ``- old`` and ``+ new``."""
    module, _, function = name.rpartition(".")
    text = (MUTANTS / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    mangled = function.rsplit("__mutmut_", 1)[0]
    old, new = (_body(text, each) for each in (f"{mangled}__mutmut_orig", function))
    lines = difflib.unified_diff(old, new, lineterm="", n=0)
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in changed)


def _body(text: str, function: str) -> list[str]:
    lines = iter(text.splitlines())
    begin = next((line for line in lines if line.lstrip().startswith(f"def {function}(")), None)
    if begin is None:
        raise LookupError(f"{function} is not in its module: remove mutants/ and run again")
    indent = len(begin) - len(begin.lstrip())
    body = takewhile(lambda line: not line.strip() or line[: indent + 1].isspace() or line.lstrip()[0] == ")", lines)
    return [line.replace(function, "") for line in (begin, *body)]


# --- on real ranks --------------------------------------------------------------------------------------------------


def try_on_ranks(names: Sequence[str], children: int) -> dict[str, bool]:
    """Return mutant -> whether tests/distributed notices it; kept, so that each is tried once."""
    tried: dict[str, bool] = json.loads(ON_RANKS.read_text()) if ON_RANKS.exists() else {}
    missing = [name for name in names if _key(name) not in tried]
    if missing and _noticed_on_ranks(""):
        raise SystemExit("tests/distributed fails without a mutant")
    with ThreadPoolExecutor(children) as pool:
        for name, noticed in zip(missing, pool.map(_noticed_on_ranks, missing), strict=True):
            print(f"{'killed' if noticed else 'survived'} on {RANKS} ranks: {name}", flush=True)
            tried[_key(name)] = noticed
            ON_RANKS.write_text(json.dumps(tried, indent=1))
    return {name: tried[_key(name)] for name in names}


def _key(name: str) -> str:
    return f"{name}: {change(name)}"


def _noticed_on_ranks(name: str) -> bool:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "-m", "pytest", "tests/distributed", "-x", "-q", "-p", "no:cacheprovider", "-k", "not numba", "--timeout=90",
    ]  # fmt: skip
    variables = os.environ | {"MUTANT_UNDER_TEST": name, "PYTHONPATH": str(MUTANTS), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, cwd=MUTANTS, env=variables, capture_output=True, timeout=RANKS_TIMEOUT)
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


# --- the page -------------------------------------------------------------------------------------------------------


def page(killed: Mapping[str, bool], reasons: Mapping[str, Reason], of: int, seed: int) -> str:
    """Return the page."""
    survivors = [name for name in sorted(killed) if not killed[name]]
    overall = share(sum(killed.values()), len(killed))
    modules: dict[str, list[bool]] = {}
    for name, noticed in killed.items():
        modules.setdefault(name.rpartition(".")[0], []).append(noticed)
    rows = [f"| `{module}` | {len(each)} | {sum(each)} |" for module, each in sorted(modules.items())]
    told = [
        f"- `{name}`: {_why(name, reasons) or '**no reason given**'}\n\n  ```diff\n{_indented(change(name))}\n  ```\n"
        for name in survivors
    ]
    parts = [
        "# Mutation of the core",
        "Written by `make mutation`, which changes the core on purpose, one place at a time, and runs the tests that "
        "reach the changed function; what they do not notice is tried on two ranks under torchrun.",
        f"Of {of:,} mutants {len(killed):,} were drawn (seed {seed}): {sum(killed.values()):,} were killed, "
        f"{100 * overall.value:.1f} % (95 % interval {100 * overall.low:.1f} % to {100 * overall.high:.1f} %).",
        "\n".join(["| module | mutants | killed |", "| --- | ---: | ---: |", *rows]),
        "## Survivors",
        "\n".join(told) if told else "None.",
    ]
    return "\n\n".join(parts) + "\n"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _why(name: str, reasons: Mapping[str, Reason]) -> str | None:
    reason = reasons.get(name)
    return reason.why if reason is not None and reason.change == change(name) else None


def read_reasons() -> dict[str, Reason]:
    if not REASONS.exists():
        return {}
    found = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    return {each["mutant"]: Reason(each["change"].strip(), each["why"]) for each in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=400, help="mutants to draw")
    parser.add_argument("--all", action="store_true", help="every mutant: hours")
    parser.add_argument("--again", action="store_true", help="run survivors anew, as after tests were added")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    started = time.monotonic()
    mutmut("nothing", children=options.children)
    every = results()
    drawn = sorted(every) if options.all else sample(every, options.sample, options.seed)
    stale = SURVIVED | NO_TESTS if options.again else set()
    todo = [name for name in drawn if every[name] is None or every[name] in stale]
    if todo:
        mutmut(*todo, children=options.children)
    ended = results()
    unclear = {name: ended[name] for name in drawn if ended[name] not in KILLED | SURVIVED | NO_TESTS}
    if unclear:
        raise SystemExit(f"{len(unclear)} mutants ended otherwise: {dict(list(unclear.items())[:5])}; run again")
    killed = {name: ended[name] in KILLED for name in drawn}
    if options.again:
        ON_RANKS.unlink(missing_ok=True)
    killed |= try_on_ranks([name for name in drawn if not killed[name]], options.children)
    reasons = read_reasons()
    if options.write:
        options.write.write_text(page(killed, reasons, len(every), options.seed), encoding="utf-8")
    survivors = [name for name in drawn if not killed[name]]
    unexplained = [name for name in survivors if _why(name, reasons) is None]
    for name in unexplained:
        print(f"\nsurvived: {name}\n{change(name)}")
    value = share(sum(killed.values()), len(killed))
    print(
        f"{sum(killed.values())} of {len(killed)} mutants killed, {100 * value.value:.1f} % "
        f"({100 * value.low:.1f} to {100 * value.high:.1f} %), {len(unexplained)} survivors without a reason, "
        f"{(time.monotonic() - started) / 60:.0f} minutes"
    )
    return int(value.value < LEAST or bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
