"""QaRL's policy, engine and losses in other trainers; each module needs the package in its name."""
