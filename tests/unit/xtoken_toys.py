"""Tokenizers of a few tokens, and samples in their tokens."""

from mcore_prefix_tree.data.vocabulary import Vocabulary
from mcore_prefix_tree.sample import Sample


class Toy:
    """Encodes with the longest token that fits; ``<s>`` is token 0, ``</s>`` token 1, and text begins at 2."""

    def __init__(self, tokens, name="toy", special=("<s>", "</s>")):
        self.name = name
        self.pieces = [*special, *tokens]
        self.vocab_size = len(self.pieces)
        self._first = len(special)

    def encode_text(self, text):
        found, at = [], 0
        while at < len(text):
            fits = [piece for piece in self.pieces[self._first :] if text.startswith(piece, at)]
            assert fits, f"{text[at:]!r} is not in the vocabulary"
            found.append(self.pieces.index(max(fits, key=len)))
            at += len(found and self.pieces[found[-1]])
        return found

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)

    def vocabulary(self):
        return Vocabulary(
            pieces=self.pieces,
            spelling="sentencepiece",
            special=frozenset(range(self._first)),
            bos=0,
            eos=1 if self._first > 1 else None,
        )

    def sample(self, *pieces, source="toy", **fields):
        """Return a sample of the named pieces."""
        return Sample(tokens=[self.pieces.index(piece) for piece in pieces], source=source, **fields)
