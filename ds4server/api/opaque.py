"""Text inside a string that clients carry back without reading it: reasoning that an answer does not show.

Not encrypted: whoever looks inside finds the text of an answer that was theirs. It only has to survive the way there and back.
"""

import base64
import binascii
import zlib

PREFIX = "ds4r1."


def sealed(text):
    """``text`` as a non-empty string of ASCII letters, digits and ``-_.=``."""
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def opened(value):
    """The text that ``sealed`` put into ``value``, or None for what is not of its making."""
    if not value.startswith(PREFIX):
        return None
    try:
        return _inflated(base64.b64decode(value[len(PREFIX) :], altchars=b"-_", validate=True)).decode()
    except (binascii.Error, zlib.error, ValueError):
        return None


LARGEST = 1 << 24  # bytes of text; longer than any reasoning, shorter than what a hostile string could unfold to


def _inflated(raw):
    inflater = zlib.decompressobj()
    out = inflater.decompress(raw, LARGEST)
    if not inflater.eof:
        raise ValueError("more than a text of ours")
    return out
