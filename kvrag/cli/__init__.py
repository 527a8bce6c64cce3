"""The commands of ``kvrag``, one module each.

Nothing here imports torch or transformers at module level, which takes seconds: ``kvrag --help`` and an estimate from a preset need
neither. Every command imports what it runs inside its function.
"""
