"""`python -m qarl`: the same as the command `qarl`; torchrun and deepspeed launch this module."""

import sys

from qarl.cli.main import main

sys.exit(main())
