"""How work is spread over threads, compiled and partitioned, whatever is computed."""
