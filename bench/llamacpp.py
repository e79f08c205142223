"""llama.cpp as a peer to measure against, through the C functions that llama-cpp-python binds.

CPU only, weights mapped, everything else as its command line has it. Knows nothing about measuring.
"""

import ctypes

import numpy as np


class PeerError(RuntimeError):
    """One sentence."""


class LlamaCpp:
    """A GGUF in llama.cpp: one sequence of up to ``context`` tokens."""

    def __init__(self, path, context, threads):
        try:
            import llama_cpp
        except ImportError:
            raise PeerError("the peer is llama.cpp, and its bindings are missing: pip install llama-cpp-python") from None
        self._lib = lib = llama_cpp
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.use_mmap = 0, True
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise PeerError(f"llama.cpp {lib.__version__} cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        params.swa_full = False  # the library's default keeps whole caches for sliding layers, the command line's does not
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise PeerError(f"llama.cpp {lib.__version__} cannot make a context of {context} tokens for {path}")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.version = f"llama-cpp-python {lib.__version__}"

    def reset(self):
        """Forget every token."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def advance(self, tokens):
        """Consume token ids, in one call, and return the logits [V] after the last."""
        ids = (self._lib.llama_token * len(tokens))(*tokens)
        if code := self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(ids, len(tokens))):
            raise PeerError(f"llama_decode of {len(tokens)} tokens failed with code {code}")
        logits = ctypes.cast(self._lib.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (self.vocabulary,)).copy()
