"""Two runs side by side in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from rlk_audit.cli.tables import STEPS_SHOWN, identity, line, problem_lines, table
from rlk_audit.offline import compare
from rlk_audit.offline.compare import MIN_SAMPLES, Pair
from rlk_audit.offline.moved import MAX_TOKENS, Shared
from rlk_audit.page.text import step_name
from rlk_audit.run_view import RunView


def comparison_tables(a: RunView, b: RunView, shared: Shared | None) -> Iterator[RenderableType]:
    """Yield the tables of a comparison, its conclusion first.

    Args:
        a, b: the sides.
        shared: what their dumps share; None where a side is a log.
    """
    for name, view in (("A", a), ("B", b)):
        yield line(f"{name}: {view.title}", "bold")
        yield from problem_lines(view)
        if view.total is None and len(view.steps) > 1:
            yield line(f"{name} has no total: the figures are those of its last step, {step_name(view.whole.step)}")
    if shared is not None and shared.identical:
        yield Text("identical: both hold the same samples with equal log-probabilities", style="bold green")
        return
    yield from (line(told, "bold") for told in compare.difference_in_words(a, b))
    yield _test(a, b)
    yield _pairs("figures", compare.headlines(a, b))
    yield from _steps(a, b)
    buckets = compare.buckets(a, b)
    if buckets:
        yield _pairs("mean abs(dlogp) where it differs most", buckets)
    if shared is not None:
        yield from _shared(shared)


def _test(a: RunView, b: RunView) -> Text:
    if a.sample_means is None or b.sample_means is None:
        return Text("no test: a log holds no samples, so chance cannot be told from a difference")
    test = compare.sample_test(a.sample_means, b.sample_means)
    counts = f"{len(a.sample_means)} and {len(b.sample_means)}"
    return Text(f"no test: {counts} samples, at least {MIN_SAMPLES} are needed" if test is None else str(test))


def _pairs(title: str, pairs: Sequence[Pair]) -> RenderableType:
    return table(title, ("", "A", "B", "B / A"), [(pair.name, pair.a, pair.b, pair.ratio) for pair in pairs])


def _steps(a: RunView, b: RunView) -> Iterator[RenderableType]:
    p50 = dict(compare.steps(a, b, "abs_dlogp_p50"))
    p99 = dict(compare.steps(a, b, "abs_dlogp_p99"))
    if len(p50) < 2:
        return
    every = -(-len(p50) // STEPS_SHOWN)
    rows = [
        (str(step), p50[step].a, p50[step].b, p99[step].a, p99[step].b, p99[step].ratio) for step in list(p50)[::every]
    ]
    title = "steps" if every == 1 else f"every {every}th step"
    yield table(title, ("step", "p50 A", "p50 B", "p99 A", "p99 B", "p99 B / A"), rows)
    alone = len(a.steps) - len(p50), len(b.steps) - len(p50)
    if any(alone):
        yield Text(f"steps of one side only: {alone[0]} of A, {alone[1]} of B")


def _shared(shared: Shared) -> Iterator[RenderableType]:
    told = f"{shared.samples} samples are in both, of {shared.samples_a} and {shared.samples_b}"
    yield Text(told if shared.complete else f"{told}; only the first {MAX_TOKENS:,} tokens of A were looked for")
    if shared.moved:
        rows = [
            (
                *map(identity, (token.step, token.sample_index, token.token_position, token.token_id)),
                token.dlogp_a,
                token.dlogp_b,
            )
            for token in shared.moved
        ]
        yield table("tokens that moved most", ("step", "sample", "position", "token", "dlogp A", "dlogp B"), rows)
