"""vLLM as an engine: in this process, and what runs inside its workers."""
