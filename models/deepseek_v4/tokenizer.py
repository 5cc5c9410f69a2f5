"""Text to token ids and back, streaming."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from halma.hal.errors import ModelError

_UNFINISHED = "�"
"""What a decoder shows for the first bytes of a character whose rest has not come yet."""


class TextCodec:
    """A model directory's ``tokenizer.json``.

    Args:
        path: the directory.
        bos: put in front of every prompt.
        vocab_size: of the model; a larger tokenizer is refused, since its ids would index past the embedding.

    Raises:
        ModelError: no tokenizer, an unreadable one, or one that does not fit the model.
    """

    def __init__(self, path: Path, *, bos: int, vocab_size: int) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                "the model has no tokenizer",
                asked=str(path),
                found="no tokenizer.json in it",
                do="copy the checkpoint's tokenizer.json there; token ids can be given with --prompt-ids",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError("the tokenizer cannot be read", asked=str(file), found=str(error)) from error
        if self._tokenizer.get_vocab_size() > vocab_size:
            raise ModelError(
                "the tokenizer does not fit the model",
                found=f"{self._tokenizer.get_vocab_size()} tokens, the model's vocab_size is {vocab_size}",
                do="use the tokenizer of this checkpoint",
            )
        self._bos = bos

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` with bos in front."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (self._bos, *ids) if ids[:1] != [self._bos] else tuple(ids)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A decoder that is fed one token at a time."""
        return TextStream(self)


class TextStream:
    """Turns tokens into text as they come; a character split over tokens is held back until it is whole."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly none."""
        self._ids.append(token)
        text = self._codec.decode(self._ids)
        if text.endswith(_UNFINISHED):
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        return new

    def finish(self) -> str:
        """What was held back, as it is."""
        text = self._codec.decode(self._ids)
        new = text[len(self._shown) :]
        self._shown = text
        return new
