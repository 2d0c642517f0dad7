"""QaRL's policy and engine in other people's trainers; each module needs an extra of its name."""
