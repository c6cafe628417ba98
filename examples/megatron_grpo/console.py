"""What the run prints: one line a step, then the worst tokens with their text and the drift of each rank."""

import task
from rlk_audit import StepReport
from rlk_audit.finding import Finding
from rlk_audit.report import RankSummary, WorstToken
from rollout import Rollout

TOKENS_SHOWN = 10
STEPS_SHOWN = 6

_COLUMNS = (
    ("compared", "compared_token_count", "{:8d}"),
    ("mean", "abs_dlogp_mean", "{:8.4f}"),
    ("p50", "abs_dlogp_p50", "{:8.4f}"),
    ("p99", "abs_dlogp_p99", "{:8.4f}"),
    ("max", "abs_dlogp_max", "{:8.4f}"),
    ("kl0", "approx_kl0", "{:9.6f}"),
    ("clip0", "clipfrac0", "{:6.3f}"),
    ("warn", "warning_count", "{:4d}"),
)


def in_context(rollout: Rollout, position: int) -> str:
    """The sample's text with the token at `position` of its response in brackets."""
    before, after = rollout.response[:position], rollout.response[position + 1 :]
    parts = (task.text(rollout.prompt + before), f"[{task.text([rollout.response[position]])}]", task.text(after))
    return " ".join(part for part in parts if part)


class Console:
    """Owned by the rank that has the result."""

    def __init__(self) -> None:
        self.worst: list[tuple[int, WorstToken, str]] = []
        self.ranks: list[tuple[int, tuple[RankSummary, ...]]] = []
        self.findings: tuple[Finding, ...] = ()

    def step(self, step: int, reward: float, loss: float, report: StepReport | None, rollouts: list[Rollout]) -> None:
        line = f"step {step:3d}  reward {reward:.3f}  loss {loss:8.4f}"
        if report is not None:
            figures = (f"{name} {form.format(report.metrics[key])}" for name, key, form in _COLUMNS)
            engines = (
                f"{b.name} {b.abs_dlogp_mean:.4f}" for b in report.breakdowns["engine"] if b.compared_token_count
            )
            line = "  ".join((line, *figures, *engines, *map(_where, report.worst_tokens[:1])))
            self._keep(step, report, rollouts)
        print(line, flush=True)

    def _keep(self, step: int, report: StepReport, rollouts: list[Rollout]) -> None:
        for token in report.worst_tokens:
            self.worst.append((step, token, in_context(rollouts[token.sample_index], token.token_position)))
        self.ranks.append((step, report.rank_table))

    def close(self) -> None:
        """Print the tables of the whole run."""
        if not self.worst:
            return
        worst = sorted(self.worst, key=lambda entry: -entry[1].abs_dlogp)[:TOKENS_SHOWN]
        _print_table(
            "Worst tokens of the run: d = train - rollout log-probability",
            ("step", "engine", "rank", "sample", "position", "train", "rollout", "d", "text"),
            [_worst_row(*entry) for entry in worst],
        )
        members = [f"rank {summary.rank}" for summary in self.ranks[-1][1]]
        _print_table(
            "Drift of each rank of the reduction: mean / maximum of abs(d); samples of e0 come first, then those of e1",
            ("step", *members),
            [(str(step), *map(_rank_cell, table)) for step, table in self.ranks[-STEPS_SHOWN:]],
        )
        print("\nDiagnosis of the last step, strongest cause first", flush=True)
        for finding in self.findings:
            print(f"  {finding}", flush=True)


def _where(token: WorstToken) -> str:
    return f"worst {token.labels['engine']} sample {token.sample_index} position {token.token_position}"


def _worst_row(step: int, token: WorstToken, text: str) -> tuple[str, ...]:
    ids = (step, token.labels["engine"], token.rank, token.sample_index, token.token_position)
    log_probs = (token.train_logp, token.rollout_logp, token.dlogp)
    return (*map(str, ids), *(f"{value:.4f}" for value in log_probs), text)


def _rank_cell(summary: RankSummary) -> str:
    return f"{summary.abs_dlogp_mean:.4f} / {summary.abs_dlogp_max:.4f} ({summary.compared_token_count} tokens)"


def _print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}", flush=True)
    try:
        from rich.console import Console as RichConsole
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows))
        print(*lines, sep="\n", flush=True)
        return
    table = Table()
    for name in header:
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    # A fixed width, so that a log file shows whole rows as a terminal does.
    RichConsole(width=160).print(table)
