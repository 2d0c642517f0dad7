"""The learner: it takes groups of completions and steps the master weights."""
