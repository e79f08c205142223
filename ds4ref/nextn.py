"""The predictor block (NextN; multi-token prediction, DeepSeek-V3 report, section 2.2) inside a model's main file.

A block of the model's own kind that reads ``eh_proj [enorm(embedding), hnorm(hidden)]``. Knows the tensors only: which of
them a family has beyond these, and what runs the block, is not its business. Letters: D hidden, V vocabulary.
"""


def joint_tensors(prefix, D):
    """Shapes of what joins the hidden row and the next token's embedding into the block's input."""
    return {
        f"{prefix}nextn.eh_proj.weight": (D, 2 * D),
        f"{prefix}nextn.enorm.weight": (D,),
        f"{prefix}nextn.hnorm.weight": (D,),
    }


def own_ends(prefix, D, V):
    """Shapes of an embedding and a head of the predictor's own, in place of the trunk's: optional wherever they occur."""
    return {f"{prefix}nextn.{name}.weight": (V, D) for name in ("embed_tokens", "shared_head_head")}
