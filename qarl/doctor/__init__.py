"""`qarl doctor`: what would keep a run from working, found before one is started."""
