"""ds4ref: a slow, readable NumPy reference of every ds4 model family."""
