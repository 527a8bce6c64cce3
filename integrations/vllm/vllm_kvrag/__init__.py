"""kvrag for vLLM: prompts reuse stored chunks, and vLLM decodes.

::

    connector ─┬→ scheduler: planning, private (blocks)
               └→ worker: weights, proof, blending
    loader ─→ borrowed (a model of transformers with vLLM's weights), linear (its layers on CPUs)

``planning``, ``blending``, ``private`` and ``borrowed`` need no vLLM.
"""
