"""`python -m qarl`: what the command `qarl` is, and what torchrun and deepspeed launch."""

import sys

from qarl.cli.main import main

sys.exit(main())
