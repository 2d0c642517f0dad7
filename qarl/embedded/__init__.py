"""The embedded policies: recipe and build."""
