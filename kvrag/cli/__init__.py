"""Command line, ``kvrag COMMAND``.

::

    app ─▶ ask (ask, explain, verify) · precompute · measure (evaluate, calibrate) · estimate
           · serve · store (stats, documents, fsck, gc, rm, export, import) · kernels · demo
    commands ─▶ options (flags ─▶ configs ─▶ engine) · documents (files ─▶ prompts, chunks) · output
    store ─▶ check (check, clean up and copy a store)

May import every other room but ``testing``. Commands import torch and transformers inside their
functions, because that takes seconds: ``kvrag --help`` and an estimate from a preset need neither.
Commands of other packages import from ``options`` and ``plugins``.
"""
