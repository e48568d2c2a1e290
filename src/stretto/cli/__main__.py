"""`python -m stretto.cli` is `stretto`."""

import sys

from stretto.cli import main

sys.exit(main())
