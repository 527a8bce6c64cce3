"""Texts for tests. Not in conftest.py: a folder with a conftest of its own would hide it."""

import torch

_WORDS = """
archive reader keeper table window box key value chunk repair order question answer model token
layer head row prompt river stone letter harbour winter lamp ledger garden copper signal thread
"""
WORDS = _WORDS.split()


def make_chunks(count: int, *, words: int = 40, seed: int = 0) -> list[str]:
    """Distinct chunk texts of about ``3 × words`` tiny tokens."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, words), generator=generator).tolist()
    return [
        f"Note {seed}-{i}: " + " ".join(WORDS[j] for j in row) + "." for i, row in enumerate(picks)
    ]


def asking(chunks: list[str], *order: int, question: str = "Who?") -> list[dict[str, str]]:
    """A message that shows some of the chunks, in this order, and asks."""
    text = "\n\n".join([*(chunks[i] for i in order), question])
    return [{"role": "user", "content": text}]
