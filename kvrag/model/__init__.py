"""The only package that knows transformers' internals: a causal LM as kvrag's stages see it.

Nothing is patched, and no architecture is accepted by its name. Structure says where keys, rotations and masks are to be looked for;
one forward of a few tokens at load proves, layer by layer, that what was found is what the model attends to (:mod:`.probe`).

```
support   what can't be moved, from the config or the module tree, each with its reason
switch    the attention function and the mask function that are switched in for the time of a forward
layers    the attention modules, and where position-free keys can be taken from them
masks     who sees whom, read from the model's own mask functions
rotary    the rotary tables and the model's own rotation, whatever its signature
probe     which of these hold for which layer; a refusal where none does
lm        forwards over chosen rows, rotations, capture
```
"""

from kvrag.model.forward import StopForward
from kvrag.model.lm import CausalLM
from kvrag.model.support import check_supported

__all__ = ["CausalLM", "StopForward", "check_supported"]
