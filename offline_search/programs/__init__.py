"""Programs that a language model wrote: the sandbox, and what they return."""
