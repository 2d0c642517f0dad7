"""The pages of `qarl report` and `qarl mismatch`, each one file that needs only a browser."""
