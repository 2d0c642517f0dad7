"""Problems that would stop or spoil a run, reported before it begins: `qarl check`."""
