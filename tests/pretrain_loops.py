"""Stands in for Megatron-LM's ``megatron.training.training``, which the wheels of megatron-core ship from 0.19 on only.

Of the releases 0.12 to 0.19 it has the parameters of ``pretrain`` and ``train_step``, the order in which they call what
they are given, and the places in their results that the audit reads. What a release does besides is left out. The model
provider gives the chunks and the optimizer; the dataset provider gives, for training and for evaluation, a function
from the iteration to its data iterator; ``get_forward_backward_func`` is replaced by whoever runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

ARGUMENTS: list[str] = []
"""The command line."""
_args: argparse.Namespace | None = None


def get_args() -> argparse.Namespace:
    assert _args is not None, "args is not initialized."
    return _args


def get_forward_backward_func(**_: Any) -> Callable[..., Any]:
    raise NotImplementedError("given by the test")


def parse_and_validate_args(extra_args_provider: Callable[..., Any] | None = None, **_: Any) -> argparse.Namespace:
    global _args
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--iteration", type=int, default=0, help="that of the checkpoint")
    parser.add_argument("--train-iters", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--rerun-iteration", type=int, help="this one runs forward and backward twice")
    parser.add_argument("--overflow-iteration", type=int, help="this one's update is skipped")
    parser.add_argument("--seq-length", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    _args = parser.parse_args(ARGUMENTS)
    _args.curr_iteration = _args.iteration
    return _args


def pretrain_0_12(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
) -> None:
    """0.12 and 0.13: a training step finds its schedule itself."""
    parse_and_validate_args(extra_args_provider)
    train(forward_step_func, model_provider, train_valid_test_dataset_provider, finds_schedule=True)


def pretrain_0_14(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
) -> None:
    """0.14 to 0.17: the schedule is found before the first step."""
    parse_and_validate_args(extra_args_provider)
    train(forward_step_func, model_provider, train_valid_test_dataset_provider)


def pretrain_0_18(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
) -> None:
    """0.18: arguments are parsed before."""
    train(forward_step_func, model_provider, train_valid_test_dataset_provider)


def pretrain_0_19(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    process_non_loss_data_func: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    skip_model_parallel_init: bool = False,
) -> None:
    """0.19: the forward step has moved, and a step knows the groups."""
    train(forward_step_func, model_provider, train_valid_test_dataset_provider, pg_collection=pg_collection)


def train(
    forward_step_func: Any,
    model_provider: Any,
    dataset_provider: Any,
    finds_schedule: bool = False,
    pg_collection: Any = None,
) -> None:
    args = get_args()
    model, optimizer = model_provider()
    training, evaluation = dataset_provider()
    given = {} if finds_schedule else {"forward_backward_func": get_forward_backward_func()}
    for iteration in range(args.iteration, args.train_iters):
        args.curr_iteration = iteration
        train_step(forward_step_func, training, model, optimizer, None, None, **given, pg_collection=pg_collection)
        evaluate(forward_step_func, evaluation, model)


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Any = None,
    iteration: Any = None,
    pg_collection: Any = None,
) -> tuple[Any, ...]:
    args = get_args()
    runs = 2 if args.curr_iteration == args.rerun_iteration else 1
    for _ in range(runs):
        optimizer.zero_grad()
        schedule = forward_backward_func or get_forward_backward_func()
        losses = _run(schedule, forward_step_func, data_iterator, model, forward_only=False)
    skipped = args.curr_iteration == args.overflow_iteration
    if skipped:
        return {}, 1, False, False, None, None, None
    optimizer.step()
    return {"lm loss": losses}, 0, False, False, None, 1.0, 0


def evaluate(forward_step_func: Any, data_iterator: Any, model: Any) -> None:
    for chunk in model:
        chunk.eval()
    _run(get_forward_backward_func(), forward_step_func, data_iterator, model, forward_only=True)
    for chunk in model:
        chunk.train()


def _run(schedule: Any, forward_step_func: Any, data_iterator: Any, model: Any, forward_only: bool) -> Any:
    args = get_args()
    return schedule(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator(args.curr_iteration),
        model=model,
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
