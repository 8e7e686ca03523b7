"""A tokenizer made in process: words with the space before them, numbered as they come."""

import re


class Words:
    """As much of a transformers tokenizer as an inspection asks for."""

    def __init__(self, size: int, start: str | None = None) -> None:
        self._size = size
        self._ids: dict[str, int] = {}
        self._start = start
        self.all_special_ids = [] if start is None else [self._id(start)]

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool
    ) -> dict[str, list[int]]:
        ids = [self._id(piece) for piece in re.findall(r" ?\w+|\s|[^\w\s]", text)]
        return {"input_ids": [*(self.all_special_ids if add_special_tokens else []), *ids]}

    def decode(self, ids: list[int], *, clean_up_tokenization_spaces: bool) -> str:
        return "".join(self.convert_ids_to_tokens(token) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return list(self._ids)[token] if token < self._size - 1 else "\N{REPLACEMENT CHARACTER}"

    def _id(self, piece: str) -> int:
        # The last number stands for all words that come when the others are taken.
        return min(self._ids.setdefault(piece, len(self._ids)), self._size - 1)
