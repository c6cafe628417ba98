"""Arrays over a whole sequence, where entry t is of token t, cut to the response."""

from __future__ import annotations

import numpy as np

from rlk_audit.dumps.sample import Bools


def response_of(response_mask: Bools, length: int) -> slice:
    """Return where the response is: from its first active token to the end; nowhere without one.

    The first token of a sequence has no log-probability, so that no response begins there.

    Args:
        response_mask: bool [tokens], which the trainer trains on; between turns it is not active.
        length: tokens without padding.
    """
    active = np.flatnonzero(response_mask[:length])
    return slice(max(int(active[0]), 1) if len(active) else length, length)
