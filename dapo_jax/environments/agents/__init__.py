"""Agents that own their loop: programs that send the policy requests in OpenAI's chat format. A request is the moment after a turn, and its answer is the next turn."""
