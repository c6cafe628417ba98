"""Texts of tokens, for people to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class TokenTexts:
    """Turns token ids into texts; without a tokenizer the ids themselves.

    Args:
        path: a ``tokenizer.json``, or the folder that holds one.

    Raises:
        ValueError: the tokenizer cannot be read, or the package that reads it is not installed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._tokenizer = None if path is None else _load(path)

    def of(self, ids: npt.NDArray[np.int64] | None) -> tuple[str, ...]:
        """Return a text an id; nothing where no ids are known."""
        if ids is None:
            return ()
        return tuple("?" if number < 0 else self._text(number) for number in ids.tolist())

    def _text(self, number: int) -> str:
        if self._tokenizer is None:
            return str(number)
        # Alone, so that texts stay one a token; special tokens are what one looks for.
        text: str = self._tokenizer.decode([number], skip_special_tokens=False)
        return text or self._tokenizer.id_to_token(number) or str(number)


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("texts of tokens need tokenizers: pip install 'rlk_audit[tokenizer]'") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"the tokenizer {file} cannot be read: {error}; expected a tokenizer.json") from error
