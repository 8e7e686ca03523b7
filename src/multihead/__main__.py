"""`python -m multihead`: the same as the `multihead` command."""

import sys

from multihead.cli import main

sys.exit(main())
