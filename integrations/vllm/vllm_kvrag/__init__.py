"""kvrag for vLLM: prompts reuse stored chunks, and vLLM decodes.

::

    connector ─┬→ scheduler: planning, private (blocks)
               └→ worker: weights, proof, blending
    front ─→ the API before vLLM's server, for ``kvrag serve --engine vllm``
    loader ─→ borrowed (a model of transformers with vLLM's weights), linear (its layers on CPUs)

``planning``, ``blending``, ``private`` and ``borrowed`` need no vLLM.
The connector imports ``kvrag.adapters``; the front, the server's package and the core, too.
"""
