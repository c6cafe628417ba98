"""The audit of a training with Megatron-Bridge, as one of its callbacks.

    audit = BridgeAudit()

    def forward_step(state, data_iterator, model):                     # or audit.attach, with ``labels=``
        ...                                                            # in the loss function: audit.observe(...)

    pretrain(config, audit.wrap_forward_step(forward_step), callbacks=[audit])

Nothing of Megatron-Bridge is imported: its manager registers the methods of an object by the names of its events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlk_audit.config import as_config, refuse_no_function
from rlk_audit.megatron_plugin import ForwardStep, MegatronAudit, NotStarted, register
from rlk_audit.report import StepReport


class BridgeAudit:
    """A rank's handle on the audit; until the training starts its calls do nothing.

    A report's step is the iteration as Megatron-Bridge logs it: 1 is the first.

    Args:
        forward: as in ``megatron_plugin.register``; what a forward step computes in training is ``current``.
        options: further keyword arguments of ``register``, such as ``config`` or ``cp_sharded``; arguments of a
            command line, if there are any, are ``args``.
    """

    def __init__(self, forward: str = "current", **options: Any) -> None:
        self.audit: MegatronAudit = NotStarted(
            "on_train_start did not come; give it to Megatron-Bridge, as in pretrain(..., callbacks=[audit])",
            options.get("args"),
            options.get("config"),
        )
        """The registered audit, from the start of the training on."""
        self.report: StepReport | None = None
        """The report of the last step, on ranks of the last pipeline stage."""
        as_config(options.get("config"))
        self._options = {"forward": forward, **options}

    def observe(self, *args: Any, **fields: Any) -> None:
        """Add one micro-batch's log-probabilities, see ``MegatronAudit.observe``."""
        self.audit.observe(*args, **fields)

    def attach(self, *args: Any, **fields: Any) -> None:
        """Inside the forward step: give what ``labels=`` training lacks, see ``MegatronAudit.attach``."""
        self.audit.attach(*args, **fields)

    def wrap_forward_step(self, forward_step_func: ForwardStep) -> ForwardStep:
        """Return a forward step that numbers its micro-batches; with the signature of the given one.

        Its parameters may begin with Megatron-Bridge's state, as ``(state, data_iterator, model, ...)``.
        """
        refuse_no_function("forward_step_func", forward_step_func)

        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            state, rest = (args[:1], args[1:]) if hasattr(args[0], "train_state") else ((), args)
            step: Callable[..., Any] = functools.partial(forward_step_func, *state)
            return self.audit.wrap_forward_step(step)(*rest, **kwargs)

        return forward_step

    def on_train_start(self, context: Any) -> None:
        """Collective: every rank of the training must call this. Registers the audit.

        Raises:
            LayoutMismatchError, ValueError, ImportError, OSError: as ``register``.
        """
        self.audit = register(model=context.model, **self._options)
        self.audit.weight_version = context.state.train_state.step

    def on_train_step_end(self, context: Any) -> None:
        """Collective: every rank of the training must call this. Ends a step.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict.
        """
        # The event comes before the iteration is counted.
        iteration = context.state.train_state.step + 1
        self.report = self.audit.step_end(iteration, updated=not context.skipped_iter)

    def on_train_end(self, context: Any) -> None:
        """Finish what is in flight and close the sinks. Starts no communication."""
        self.audit.close()
