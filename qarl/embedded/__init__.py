"""The embedded policies: small language models that are built on this machine."""
