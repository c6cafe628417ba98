"""Audit of a training that Megatron-LM's ``pretrain`` runs: one call, and the audit starts and steps by itself.

    audit = PretrainAudit()

    def loss_func(...):                                                # or ``audit.attach`` in forward_step
        audit.observe(train_log_probs, rollout_log_probs, mask, sample_index=...)

    audit.wrap_pretrain(pretrain)(datasets_provider, model_provider, model_type, forward_step, ...)

``pretrain`` has no hook for the end of a step, and its parameters move from release to release. So parameters are bound
by their names, and for the time of the call the loop's own ``train``, ``train_step`` and ``get_forward_backward_func``
are wrapped in the module that ``pretrain`` is from. A replayed CUDA graph of a whole iteration calls no Python, so the
audit sees nothing of it, and says ``nothing_compared``.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlk_audit.config import as_config, refuse_no_function
from rlk_audit.megatron_plugin import ForwardStep, MegatronAudit, NotStarted, add_rlk_args, register

_HOOKED = ("train", "train_step", "get_forward_backward_func", "get_args")
"""What the loop's module must have: every release from 0.12 on does."""

ArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class PretrainAudit:
    """A rank's handle on the audit of a ``pretrain``; until the first training step its calls are free.

    A report's step is the iteration as Megatron-LM logs it: 1 is the first.

    Args:
        forward: as in ``register``; the forward of ``pretrain``'s own loop is the ``current`` one.
        options: further keyword arguments of ``register``, such as ``config`` or ``cp_sharded``. The parsed arguments
            and the model are those of the loop.
    """

    def __init__(self, forward: str = "current", **options: Any) -> None:
        self.audit: MegatronAudit = NotStarted(
            "no wrapped pretrain runs; call audit.wrap_pretrain(pretrain)(...) in its place",
            config=options.get("config"),
        )
        """The registered audit, from the first training step on."""
        as_config(options.get("config"))
        self._options = {"forward": forward, **options}

    def observe(self, *args: Any, **fields: Any) -> None:
        """Add one micro-batch's log-probabilities, see ``MegatronAudit.observe``."""
        self.audit.observe(*args, **fields)

    def attach(self, *args: Any, **fields: Any) -> None:
        """Inside the forward step: give what ``labels=`` training lacks, see ``MegatronAudit.attach``."""
        self.audit.attach(*args, **fields)

    @property
    def weight_version(self) -> int:
        """Optimizer updates of the trainer so far; of a resumed run, counted from its iteration."""
        return self.audit.weight_version

    def wrap_pretrain(self, pretrain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``pretrain`` that audits; it takes the same arguments, and adds the audit's to the command line.

        Where ``pretrain`` takes no ``extra_args_provider`` (0.18 and later), give ``add_rlk_args`` to Megatron-LM's
        ``parse_and_validate_args``. Each call registers anew, at its first training step, on every rank; where a
        ``pretrain`` is restarted inside the process, wrap it before the restarting wrapper.

        Raises:
            TypeError: the function is not the ``pretrain`` of a Megatron-LM.
        """
        if not callable(pretrain):
            raise TypeError(f"expected the pretrain of Megatron-LM, got {type(pretrain).__name__}")
        signature = inspect.signature(pretrain)
        loop: dict[str, Any] = getattr(inspect.unwrap(pretrain), "__globals__", {})
        missing = [name for name in _HOOKED if name not in loop]
        if missing or "forward_step_func" not in signature.parameters:
            raise TypeError(
                f"expected the pretrain of Megatron-LM, got {pretrain!r}, which lacks "
                f"{', '.join(missing) or 'the parameter forward_step_func'}; in another loop use register and step_end"
            )

        @functools.wraps(pretrain)
        def audited_pretrain(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["forward_step_func"] = self._wrap_forward_step(bound.arguments["forward_step_func"])
            if "extra_args_provider" in signature.parameters:
                provider = bound.arguments.get("extra_args_provider")
                bound.arguments["extra_args_provider"] = _with_rlk_args(provider)
            if isinstance(self.audit, NotStarted):  # evaluation may come before the first training step
                self.audit = MegatronAudit(None)
            with _replaced(loop, self._hooks(loop)):
                return pretrain(*bound.args, **bound.kwargs)

        return audited_pretrain

    def _hooks(self, loop: dict[str, Any]) -> dict[str, Any]:
        return {
            "train": self._wrap_train(loop["train"]),
            "train_step": self._wrap_train_step(loop["train_step"], loop["get_args"]),
            "get_forward_backward_func": self._wrap_schedules(loop["get_forward_backward_func"]),
        }

    def _wrap_forward_step(self, forward_step_func: ForwardStep) -> ForwardStep:
        refuse_no_function("forward_step_func", forward_step_func)

        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            # The loop holds this function since before the audit was registered.
            return self.audit.wrap_forward_step(forward_step_func)(*args, **kwargs)

        return forward_step

    def _wrap_schedules(self, get_forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_forward_backward_func)
        def get_audited(*args: Any, **kwargs: Any) -> Any:
            forward_backward_func = get_forward_backward_func(*args, **kwargs)

            @functools.wraps(forward_backward_func)
            def schedule(*args: Any, **kwargs: Any) -> Any:
                return self.audit.wrap_schedule(forward_backward_func)(*args, **kwargs)

            return schedule

        return get_audited

    def _wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def audited_train(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                # Not later: what comes after finishes the writers of the training.
                self.audit.close()

        return audited_train

    def _wrap_train_step(self, train_step: Callable[..., Any], get_args: Callable[[], Any]) -> Callable[..., Any]:
        signature = inspect.signature(train_step)
        registered = False

        @functools.wraps(train_step)
        def audited_train_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal registered
            parsed = get_args()
            if not registered:
                given = signature.bind(*args, **kwargs).arguments
                self.audit = register(
                    parsed, model=given["model"], pg_collection=given.get("pg_collection"), **self._options
                )
                self.audit.weight_version = parsed.iteration
                registered = True
            result = train_step(*args, **kwargs)
            skipped = result[1]
            self.audit.step_end(parsed.curr_iteration + 1, updated=not skipped)
            return result

        return audited_train_step


@contextmanager
def _replaced(names: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)


def _with_rlk_args(provider: ArgsProvider | None) -> ArgsProvider:
    def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_rlk_args(parser if provider is None else provider(parser))

    return extra_args_provider
