"""The files and the display of a run: folder, metrics, recorded tokens, tables and warnings."""
