"""The commands. Exit status: 0 fine, 1 a limit was crossed, 2 unusable input or usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rlk_audit.allreduce import Group, group_place, launched_group
from rlk_audit.cli import comparison, tables
from rlk_audit.cli.live import watch_log
from rlk_audit.cli.streams import (
    PipeConsole,
    progress_bars,
    refuse_places,
    show,
    tell,
    to_the_end_of_a_pipe,
    write_json,
)
from rlk_audit.config import AuditConfig
from rlk_audit.contracts import apply_contract
from rlk_audit.dumps.files import AUTO, FORMATS
from rlk_audit.dumps.sample import DumpError, ReadOptions
from rlk_audit.limits import Judge, Limit
from rlk_audit.offline import baseline
from rlk_audit.offline.audit import Asked, audit_dump
from rlk_audit.offline.gate import doubts, first_judged
from rlk_audit.offline.moved import shared_tokens
from rlk_audit.offline.run_log import is_run_log, read_run_logs, run_logs_in
from rlk_audit.offline.texts import TokenTexts
from rlk_audit.page.text import step_name
from rlk_audit.page.write import write_page
from rlk_audit.report import StepReport
from rlk_audit.run_view import RunView
from rlk_audit.version import __version__

CROSSED, UNUSABLE = 1, 2

app = typer.Typer(
    name="rlk-audit",
    help="Drift between the log-probabilities of training and rollout, from dumps of tokens and logs of runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Dumps (files, folders, patterns), or logs of one run (JSONL).")
]
Format = Annotated[str, typer.Option(help=f"Format of the dump: {', '.join(FORMATS)}.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Unpickle files that need it. Runs what they hold: your own files only.")
]
By = Annotated[
    list[str] | None,
    typer.Option("--by", metavar="LABEL", help="Of the dump's labels, break down by this one alone; repeat for more."),
]


def examples(*lines: str) -> str:
    """Return the examples that end a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"    {line}" for line in lines)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        show(__version__)
        raise typer.Exit


@app.command(
    epilog=examples(
        "rlk-audit report dumps/ --html page.html",
        "rlk-audit report 'dumps/step_*.jsonl' --by engine --exact",
        "torchrun --nproc-per-node 4 -m rlk_audit report dumps/ --json -",
    )
)
def report(
    paths: Paths,
    format: Format = AUTO,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON; - for standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page.")] = None,
    by: By = None,
    exact: Annotated[bool, typer.Option("--exact", help="Exact quantiles, by one more reading.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json, to show tokens as text.")
    ] = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Show what a dump or a run's log says."""
    with _refusals(), launched_group() as group:
        if html is not None and str(html) in ("-", json_file):
            raise ValueError(f"--html needs a file of its own, got {html}")
        refuse_places({"--json": json_file, "--html": html}, group)
        texts = TokenTexts(tokenizer)
        view = _view(paths, format, Asked(by, exact, texts), allow_pickle, group)
        if group_place(group)[0]:
            return
        if json_file is not None:
            write_json(view.to_dict(), json_file)
        if html is not None:
            tell(f"{html}: {write_page(view, html) / 1e6:.1f} MB")
        if json_file != "-":
            show(*tables.view_tables(view))


@app.command(
    epilog=examples(
        "rlk-audit check dumps/ --limit abs_dlogp_p99=0.05 --limit 'ess0>=0.9'",
        "rlk-audit check runs/audit.jsonl --contract contract.json --dtype bfloat16",
        "rlk-audit check dumps/ --baseline accepted.json --ratio 1.5",
    )
)
def check(
    paths: Paths,
    format: Format = AUTO,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=BOUND", help="A limit on every step; repeat for more.")
    ] = None,
    contract: Annotated[Path | None, typer.Option(metavar="FILE", help="Limits of a contract file.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Execution dtype whose thresholds the contract gives.")] = None,
    baseline_file: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="What `report --json` wrote of an accepted run.")
    ] = None,
    ratio: Annotated[float, typer.Option(help="How many times the baseline's drift is tolerated.")] = 1.5,
    allow_pickle: AllowPickle = False,
) -> None:
    """Judge every step by limits; exit 1 if one is crossed, 2 if that cannot be said."""
    with _refusals(), launched_group() as group:
        config = _limits(limit or [], contract, dtype)
        baseline.check_ratio(ratio)
        bounds = {} if baseline_file is None else baseline.read(baseline_file)
        if not config.limits and not bounds:
            raise ValueError("check needs --limit, --contract or --baseline")
        # A dump has figures of samples whatever the limits say.
        judge, of_replaced = (Judge(replace(config, samples_per_step=1)) for _ in range(2))
        view = _view(paths, format, Asked(labels=()), allow_pickle, group, config)
        _judge(view.steps, judge, config)
        _judge(view.replaced, of_replaced, config)
        unsure = list(doubts(view, judge.limits))
        failed = [*tables.verdict_lines(view.steps), *map(tables.failure_line, baseline.crossed(view, bounds, ratio))]
        if group_place(group)[0] == 0:
            show(*tables.problem_lines(view), *failed, _outcome(view, len(failed), unsure))
        status = CROSSED if failed else UNUSABLE if unsure else 0
    if status:
        raise typer.Exit(status)


@app.command(epilog=examples("rlk-audit compare dumps/bf16 dumps/fp16", "rlk-audit compare a.jsonl b.jsonl"))
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A dump or a run's log.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    format: Format = AUTO,
    allow_pickle: AllowPickle = False,
) -> None:
    """Set two runs or dumps side by side, and say whether they differ by more than chance."""
    with _refusals(), launched_group() as group:
        views = [_view([path], format, Asked(), allow_pickle, group) for path in (a, b)]
        if group_place(group)[0]:
            return
        shared = None
        if all(view.sample_means is not None for view in views):  # neither is a log
            shared = shared_tokens([a], [b], format, ReadOptions(allow_pickle))
        show(*comparison.comparison_tables(views[0], views[1], shared))


@app.command(epilog=examples("rlk-audit diagnose dumps/", "rlk-audit diagnose dumps/ --json - | jq '.[0].findings'"))
def diagnose(
    paths: Paths,
    format: Format = AUTO,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON; - for standard output.")
    ] = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Name what made the drift, by ranges of steps, with its evidence and what to check first."""
    with _refusals(), launched_group() as group:
        refuse_places({"--json": json_file}, group)
        view = _view(paths, format, Asked(), allow_pickle, group)
        if group_place(group)[0]:
            return
        if json_file is not None:
            write_json(view.to_dict()["causes"], json_file)
        if json_file != "-":
            show(
                *tables.problem_lines(view), *(line for causes in view.causes for line in tables.finding_lines(causes))
            )


@app.command(epilog=examples("rlk-audit watch runs/audit.jsonl"))
def watch(path: Annotated[Path, typer.Argument(metavar="RUN.jsonl", help="The log of a running job.")]) -> None:
    """Follow a run's log, through rotation and restarts, until interrupted."""
    with _refusals(), to_the_end_of_a_pipe():
        if path.is_dir():
            raise ValueError(f"{path} is a directory, not the log of a run")
        if path.exists() and path.stat().st_size and not is_run_log(path):
            raise ValueError(f"{path} is not the log of a run")
        watch_log(path, PipeConsole())


# --- what the commands share ----------------------------------------------------------------------------------------


def _view(
    paths: list[Path],
    format: str,
    asked: Asked,
    allow_pickle: bool,
    group: Group,
    config: AuditConfig | None = None,
) -> RunView:
    if all(is_run_log(path) for path in paths):
        if asked.labels or asked.exact:
            raise ValueError(f"{paths[0]} is the log of a run, which holds no tokens: --by and --exact need a dump")
        return read_run_logs(paths)
    options = ReadOptions(allow_pickle)
    with progress_bars(group) as progress:
        try:
            return audit_dump(
                paths, format, config=config, options=options, asked=asked, progress=progress, group=group
            )
        except DumpError as error:
            logs = run_logs_in(paths)
            if not logs:
                raise
            raise DumpError(f"{error}; {logs[0]} is the log of a run: give it by itself") from error


def _outcome(view: RunView, failures: int, unsure: list[str]) -> str:
    count = f"{len(view.steps)} step{'s' * (len(view.steps) != 1)}"
    if failures:
        return f"FAILED: {failures} in {count}"
    if unsure:
        return f"no limit was crossed in {count}, but this is no pass: {'; '.join(unsure)}"
    late = [f"{metric} from {step_name(first.step)} on" for metric, first in first_judged(view).items() if first]
    return f"passed: {count}" + (f" (by their median: {', '.join(late)})" if late else "")


def _limits(texts: list[str], contract: Path | None, dtype: str | None) -> AuditConfig:
    limits: dict[str, Any] = {}
    for given in map(Limit.parse_assignment, texts):
        bound = f"{given.relation}{given.value!r}" if given.window is None else str(given).removeprefix(given.metric)
        limits[given.metric] = (*limits.get(given.metric, ()), bound)
    config = AuditConfig(mode="strict", limits=limits)
    if contract is None:
        return config
    if dtype is None:
        raise ValueError("--contract needs --dtype, the execution dtype whose thresholds count")
    return replace(apply_contract(config, contract, dtype), mode="strict")


def _judge(reports: Sequence[StepReport], judge: Judge, config: AuditConfig) -> None:
    for report in reports:
        absent = [metric for metric in config.limits if metric not in report.metrics]
        if absent:
            raise ValueError(f"{step_name(report.step)} has no {', '.join(absent)}: it was audited without it")
        report.verdict = judge.judge(report)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what cannot be used into one sentence and exit 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        tell(f"error: {' '.join(str(error).split())}")
        raise typer.Exit(UNUSABLE) from None
