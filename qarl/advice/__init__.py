"""What would keep a run from working, or spoil it, named before it begins: `qarl check`."""
