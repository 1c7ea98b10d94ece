"""Train a planner and its tool-using sub-agents together, each with its own LLM (M-GRPO)."""

__version__ = "0.1.0"
