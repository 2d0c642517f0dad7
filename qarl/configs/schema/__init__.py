"""What a run may say: typed sections. Imports neither torch nor vllm."""
