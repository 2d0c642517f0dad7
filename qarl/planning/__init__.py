"""The memory a run needs, computed from config.json, configuration and machine before loading."""
