"""Step 3.7 Flash's predictor blocks in a file of their own, in JAX. What they compute is in ``step35.py``.

The tensors that the file repeats of the model's are not loaded again.
"""

from .step35 import draft_block, draft_input, draft_logits

__all__ = ["draft_block", "draft_input", "draft_logits"]
