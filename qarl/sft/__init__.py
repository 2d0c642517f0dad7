"""`qarl sft`: supervised fine-tuning of the low-bit policy, before reinforcement learning."""
