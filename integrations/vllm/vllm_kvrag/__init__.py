"""kvrag for vLLM: prompts reuse stored chunks, and vLLM decodes.

::

    connector ─→ blend, the scheduler: planning, private (blocks) │ the worker: weights, proof, blending
    loader ─→ borrowed (a model of transformers with vLLM's weights), linear (its layers on CPUs)

``planning``, ``blending``, ``private`` and ``borrowed`` need no vLLM.
"""
