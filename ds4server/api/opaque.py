"""Text inside a string that clients carry back without reading it: reasoning that an answer does not show.

Not encrypted: whoever looks inside finds the text of an answer that was theirs. It only has to survive the way there and back.
"""

import base64
import zlib

PREFIX = "ds4r1."


def sealed(text):
    """``text`` as a non-empty string of ASCII letters, digits and ``-_.=``."""
    raw = text.encode()
    return PREFIX + base64.urlsafe_b64encode(zlib.crc32(raw).to_bytes(4, "big") + raw).decode()


def opened(value):
    """The text that ``sealed`` put into ``value``, or None for what is not of its making."""
    if not value.startswith(PREFIX):
        return None
    try:
        raw = base64.b64decode(value[len(PREFIX) :], altchars=b"-_", validate=True)
        return raw[4:].decode() if zlib.crc32(raw[4:]) == int.from_bytes(raw[:4], "big") else None
    except ValueError:
        return None
