"""WarningLog: puts a run's warnings into the program's log, each with what it means and where to look."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from rlk_audit.report import RANKS_SHOWN, StepReport
from rlk_audit.verdict import FAIL, NO_DATA

logger = logging.getLogger(__name__)

INTERVAL = 100
"""Steps for which a code is silent after it was told."""

MEANINGS = {
    "rollout_missing": "tokens without a rollout log-probability; does the engine return one for every sampled token?",
    "rollout_sentinel": "rollout log-probabilities are an engine's placeholder, such as -9999; look at the engine",
    "train_sentinel": "train log-probabilities are a masked logit's minimum; the trainer masks sampled tokens",
    "rollout_nan": "rollout log-probabilities are NaN: broken logits of the engine, or made NaN of a missing value",
    "rollout_neginf": "rollout log-probabilities are -inf: tokens that their own engine holds impossible",
    "train_nan": "train log-probabilities are NaN; look at the training forward's logits",
    "train_neginf": "train log-probabilities are -inf; the trainer's filter (top-p, top-k) drops sampled tokens",
    "positive": "log-probabilities above 0; are these probabilities, losses without their minus, or logits?",
    "token_mismatch": "token ids of the two sides differ; rows or positions are paired wrongly",
    "zero_fill_suspect": "rollout log-probabilities are exactly 0, train's are not; prompt or tool tokens in the mask?",
    "length_mismatch": "samples were refused, because their arrays differ in length",
    "update_failed": "micro-batches were not counted, so the figures are incomplete; the rank's own log says why",
    "zero_active_sample": "samples have no active token; aborted responses, or a mask that takes all?",
    "sample_table_overflow": "active tokens have no slot in the table of samples: 0 <= sample_slot < samples_per_step",
    "duplicate_microbatch": "micro-batches came twice and were counted once, as in a rerun or a recomputed loss",
    "missing_metadata": "a label that was asked for lacks on some tokens, which count as unknown",
    "missing_rollout_log_probs": "micro-batches lack rollout log-probabilities; is the engine told to return them?",
    "tp_disagreement": "tensor-parallel ranks measured different log-probabilities of the same tokens",
    "unexpected_token_count": "not as many active tokens as the training counted; are cp_sharded and the group right?",
    "step_mismatch": "ranks ended different steps, so the figures mix them; does one skip or repeat a call of step?",
    "nothing_compared": "no token was compared, so nothing is known of the drift",
}
"""Warning code -> what it means."""


class WarningLog:
    """Tells each warning code, and each limit that failed, at once and then every INTERVAL steps at most."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def tell(self, step: int, report: StepReport) -> None:
        """Log what the step's report warns of and was not told lately; a run that was resumed earlier tells anew."""
        for subject, sentence in _sentences(report):
            told = self._told.get(subject)
            if told is None or not 0 <= step - told < INTERVAL:
                self._told[subject] = step
                logger.warning("step %s: %s", step, sentence)


def _sentences(report: StepReport) -> Iterator[tuple[str, str]]:
    for code, count in report.warnings.items():
        yield code, f"{code}={count}: {MEANINGS[code]}{_steps_told(report) if code == 'step_mismatch' else ''}"
    if report.verdict is not None:
        for place, result in enumerate(report.verdict.limits):  # a metric may have several
            subject = f"{place} {result.metric}"
            if result.outcome == FAIL:
                yield f"limit {subject}", f"a limit was crossed: {result}"
            elif result.outcome == NO_DATA:
                yield f"no data {subject}", f"a limit has no data: {result.metric} is null"


def _steps_told(report: StepReport) -> str:
    """Name the ranks that gave the step another number than most."""
    usual = Counter(rank.step for rank in report.rank_table).most_common(1)[0][0]
    others = [f"rank {rank.rank} gave {rank.step}" for rank in report.rank_table if rank.step != usual]
    more = f" and {len(others) - RANKS_SHOWN} more" if len(others) > RANKS_SHOWN else ""
    return f" (most gave {usual}; {', '.join(others[:RANKS_SHOWN])}{more})"
