"""`python -m qarl.cli`, which is also what torchrun and deepspeed launch."""

import sys

from qarl.cli.main import main

sys.exit(main())
