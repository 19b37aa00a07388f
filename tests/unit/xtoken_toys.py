"""Tokenizers of a few tokens, samples in their tokens, and the real tokenizers that tests share."""

from functools import cache

from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.data.chat import Vocabulary
from mcore_prefix_tree.sample import Sample

# A Tekken vocabulary takes a second to load.
tokenizer_of = cache(load_tokenizer)


class Toy:
    """Encodes with the longest token that fits, or with token 0; special tokens have the first ids."""

    def __init__(self, tokens, name="toy", special=("<s>", "</s>"), eos="</s>"):
        self.name, self.eos = name, eos
        self.pieces = [*special, *tokens]
        self.vocab_size = len(self.pieces)
        self._first = len(special)

    def encode_text(self, text):
        found, at = [], 0
        while at < len(text):
            fits = [piece for piece in self.pieces[self._first :] if text.startswith(piece, at)]
            found.append(self.pieces.index(max(fits, key=len)) if fits else 0)
            at += max(map(len, fits), default=1)
        return found

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)

    def vocabulary(self):
        return Vocabulary(
            pieces=self.pieces,
            spelling="sentencepiece",
            special=frozenset(range(self._first)),
            bos=self.pieces.index("<s>") if "<s>" in self.pieces else None,
            eos=self.pieces.index(self.eos) if self.eos else None,
        )

    def sample(self, *pieces, source="toy", **fields):
        """Return a sample of the named pieces."""
        return Sample(tokens=[self.pieces.index(piece) for piece in pieces], source=source, **fields)
