"""Count how often a prompt's segment-wise ids differ from the ids of its whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from difflib import SequenceMatcher
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class SeamCount:
    """Counts of differences between a prompt's segment-wise ids and the ids of its whole text.

    ``seams``: places where two segments meet; ``tokens``: segment-wise tokens; ``changed_tokens``:
    segment-wise tokens that the whole text's ids lack; ``changed_seams``: the seams next to them. A
    separator that becomes another token when alone counts both of its seams.
    """

    seams: int = 0
    changed_seams: int = 0
    tokens: int = 0
    changed_tokens: int = 0

    def __add__(self, other: SeamCount) -> SeamCount:
        return SeamCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_seams(segments: Sequence[Sequence[int]], whole: Sequence[int]) -> SeamCount:
    """Compare a prompt's segment-wise ids with the ids of its text tokenised at once.

    A difference that touches no seam, such as control-token text that stays text inside a chunk, is
    not counted.
    """
    segments = [ids for ids in segments if ids]
    ours = [i for ids in segments for i in ids]
    seams = list(accumulate(map(len, segments)))[:-1]
    changed: set[int] = set()
    changed_tokens = 0
    for kind, start, stop, *_ in SequenceMatcher(None, ours, whole, autojunk=False).get_opcodes():
        if kind != "equal":
            across = [s for s in seams if start < s < stop] or [
                s for s in seams if s in (start, stop)
            ]
            changed.update(across)
            changed_tokens += stop - start if across else 0
    return SeamCount(len(seams), len(changed), len(ours), changed_tokens)
