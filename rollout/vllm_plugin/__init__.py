"""Code that runs inside vLLM's workers, reached through `worker_extension_cls`."""
