"""The arguments of each command. What a command does is imported when it runs: torch takes seconds."""
