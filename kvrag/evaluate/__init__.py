"""Quality and cost of reuse: on prompts, on planted facts, and by arithmetic.

::

    calibrate (the default repair) → answers → questions (planted facts, scores) → engine
    verify (given prompts) → engine (its methods, as a protocol)
    estimate: bytes and seconds from a model's shape

The engine imports this room for its methods of the same names, so the functions know the engine
by a protocol alone. Imports ``types errors config cache metrics progress`` and rooms up to
``generate``.
"""
