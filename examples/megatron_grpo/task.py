"""The task: sort the digits of a short string, smallest first. A program checks the answer: no reward model."""

import torch

DIGITS = 10
SEPARATOR, END, PAD, START = 10, 11, 12, 13
VOCAB_SIZE = 16  # a multiple of every tensor-parallel size in use; ids 14 and 15 are spare
MIN_DIGITS, MAX_DIGITS = 2, 6
MAX_PROMPT = MAX_DIGITS + 2
MAX_RESPONSE = MAX_DIGITS + 2  # room for one digit too many
SEQ_LENGTH = MAX_PROMPT + MAX_RESPONSE  # 16: divisible by 2 * cp for cp 1, 2, 4 and 8

_TEXT = {SEPARATOR: ">", END: "<end>", PAD: "<pad>", START: "<start>"}


def sample_prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """`count` prompts `<start> 5 1 4 >` of unequal length."""
    lengths = torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (count,), generator=generator).tolist()
    return [[START, *torch.randint(0, DIGITS, (n,), generator=generator).tolist(), SEPARATOR] for n in lengths]


def answer(prompt: list[int], descending: bool = False) -> list[int]:
    """The sorted digits and the end token; full credit is for the ascending order alone."""
    return [*sorted(prompt[1:-1], reverse=descending), END]


def reward(prompt: list[int], response: list[int]) -> float:
    """Share of positions that are right, in [0, 1]; a wrong length costs through the denominator."""
    expected = answer(prompt)
    right = sum(a == b for a, b in zip(response, expected, strict=False))
    return right / max(len(expected), len(response))


def text(tokens: list[int]) -> str:
    """Readable form of token ids."""
    return " ".join(_TEXT.get(token, str(token)) for token in tokens)
