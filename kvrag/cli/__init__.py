"""The command line, ``kvrag COMMAND``.

::

    app ─▶ ask (ask, explain, verify) · precompute · estimate ─▶ measure · store (stats, fsck, gc, rm, export, import) · kernels · demo
              └──────────┴──────────────────┴─▶ options (flags ─▶ configs ─▶ engine) · documents (files ─▶ prompts, chunks) · output

May import every other room but ``testing``. Nothing here imports torch or transformers at module level, which takes seconds:
``kvrag --help`` and an estimate from a preset need neither. Commands import what they run inside their functions.
"""
