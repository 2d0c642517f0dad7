"""vLLM as an engine in this process, and the code that runs inside its workers."""
