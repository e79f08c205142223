"""``python -m ds4server``."""

import sys

from .cli import main

sys.exit(main())
