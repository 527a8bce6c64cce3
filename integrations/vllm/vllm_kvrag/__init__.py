"""kvrag for vLLM: prompts reuse stored chunks, and vLLM decodes.

::

    connector ─┬→ scheduler: planning, private (blocks)
               └→ worker: own (vLLM's model as kvrag's), proof, blending
    front ─→ the API before vLLM's server, for ``kvrag serve --engine vllm``
    loader ─→ own

``planning``, ``blending`` and ``private`` need no vLLM. What vLLM does not document is used in
``own``, and of its requests in ``private``.
The connector imports ``kvrag.adapters``; the front, the server's package and the core, too.
"""
