"""One process owns the weights in memory; workers map them. See :mod:`.server`, :mod:`.broker` and :mod:`.worker`."""
